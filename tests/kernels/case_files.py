"""Files of cases that run in a pytest process of their own: the choice between Triton's interpreter and its compiler is
made when kernels are imported. Two run at a time, ahead of the tests that ask for them, as each keeps one core busy.

A test asks by `@runs(…)` and the fixture `case_run` (conftest.py).
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from octavo import envs

FOLDER = Path(__file__).parent
TIMEOUT_S = 280
AT_A_TIME = 2


@dataclass(frozen=True, slots=True)
class CaseFile:
    """A file in this folder."""

    name: str
    interpret: bool = True


class CaseRun(NamedTuple):
    """How a file's run ended."""

    code: int
    said: str

    @property
    def passed(self) -> bool:
        """There were cases, and none failed."""
        return self.code == 0 and " passed" in self.said


def runs(*files: CaseFile) -> pytest.MarkDecorator:
    """For a test that asks how these ended, one after another."""
    names = [file.name.removesuffix(".py") for file in files]
    return pytest.mark.parametrize("case_run", files, ids=names, indirect=True)


class CaseRuns:
    """Runs of files, in the order in which they are named; they begin with the first question."""

    def __init__(self, files: Sequence[CaseFile]) -> None:
        self._files = files
        self._threads = ThreadPoolExecutor(AT_A_TIME, "cases")
        self._begun: dict[CaseFile, Future[CaseRun]] = {}
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def outcome(self, file: CaseFile) -> CaseRun:
        """Wait for a file's run."""
        for each in self._files if not self._begun else ():
            self._begun[each] = self._threads.submit(self._run, each)
        return self._begun[file].result()

    def _run(self, file: CaseFile) -> CaseRun:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file.name]
        environment = envs.child(TRITON_INTERPRET=str(int(file.interpret)), OMP_NUM_THREADS="1")
        with self._lock:
            if self._closed:
                return CaseRun(1, "the tests were ended")
            process = subprocess.Popen(
                command, cwd=FOLDER, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            self._running.add(process)
        try:
            said, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said = f"{file.name} took more than {TIMEOUT_S} s\n{process.communicate()[0]}"
        with self._lock:
            self._running.discard(process)
        return CaseRun(process.returncode, said[-8000:])

    def close(self) -> None:
        """End what nobody waits for any more: the tests were interrupted."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
