"""The small kernels at tiny sizes in Triton's interpreter, by the script that times them on a GPU: it runs, and its
numbers are right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from octavo import envs

FOLDER = Path(__file__).parent


def test_every_row_of_the_script() -> None:
    command = [sys.executable, "gpu_small.py", "--tiny"]
    environment = envs.child(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.search(r"(\d+) rows\n0 failures", done.stdout)
    assert rows, done.stdout
    assert int(rows[1]) >= 39
