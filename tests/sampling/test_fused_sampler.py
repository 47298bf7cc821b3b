"""Runs fused_cases.py where Triton interprets, which must be chosen before triton is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from octavo import envs


def test_cases() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "fused_cases.py"],
        cwd=Path(__file__).parent,
        env=envs.child(TRITON_INTERPRET="1", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
