"""Triton's folder of compiled kernels, where two processes never compile the same one: the engine may want a kernel
that its build (kernel_build.py) has begun, or the other way round. Who comes second waits and reads what the first has
made.

What is locked is the kernel's own folder, so that a process that dies leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import os
import time

from triton import knobs
from triton.runtime.cache import FileCacheManager

PATIENCE_S = 60.0
"""So long somebody else's compilation is waited for; then the kernel is compiled here as well."""
POLL_S = 0.01


class SharedCache(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """Of one kernel. A `get_group` that finds nothing begins a compilation, which `put_group` ends (or the end of this
    object, when it failed)."""

    _lock: int | None = None

    def get_group(self, filename: str) -> dict[str, str] | None:
        found = self._whole_group(filename)
        if found is None and self._lock is None:
            self._lock = _locked(self.cache_dir)
            found = self._whole_group(filename)
            if found is not None:
                self._unlock()
        return found

    def _whole_group(self, filename: str) -> dict[str, str] | None:
        found: dict[str, str] | None = super().get_group(filename)
        return found if found is not None and filename in found else None

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        try:
            path: str = super().put_group(filename, group)
            return path
        finally:
            self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __del__(self) -> None:
        self._unlock()


def _locked(folder: str) -> int | None:
    """A descriptor that holds the folder's lock; None where nobody gives one."""
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(POLL_S)
        except OSError:  # a file system without locks
            break
        else:
            return lock
    os.close(lock)
    return None


def share() -> None:
    """Use it for all kernels of this process, unless the user has named another."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = SharedCache
