"""Runs the cases of the kernels of mixtures of experts, each set in its own process: the choice between Triton's
interpreter and its compiler is made when kernels are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("cases", "interpret"), [("moe_cases.py", "1"), ("moe_compile_cases.py", "0")], ids=["numerics", "compile"]
)
def test_cases(cases: str, interpret: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / cases)]
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=FOLDER)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
