"""The sampling kernels without a GPU: tokens in Triton's interpreter, and compilation for an H200 (sm_90), each in its
own process: the choice between interpreter and compiler is made when kernels are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo import envs

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("cases", "interpret"),
    [("sample_cases.py", "1"), ("sample_compile_cases.py", "0")],
    ids=["numerics", "compile"],
)
def test_cases(cases: str, interpret: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", cases],
        cwd=FOLDER,
        env=envs.child(TRITON_INTERPRET=interpret, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
