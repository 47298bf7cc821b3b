"""Runs expert_kernel_cases.py in a process that sets TRITON_INTERPRET before it imports triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from octavo import envs


def test_cases() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "expert_kernel_cases.py"]
    environment = envs.child(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    folder = Path(__file__).parent
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, timeout=240)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
