"""SIGTERM and SIGINT while the serving process has no event loop: before there is one they are noted, for the service
to act on; after its end a second one ends the process at once, as it does in between.

Not here: what a signal does to a running service (service.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGINT)

_noted: list[int] = []
"""Of this process, as signals are: those that nobody has acted on yet."""


def take() -> list[int]:
    """Those that came so far; the caller acts on them, and on what comes from now on."""
    taken = _noted.copy()
    _noted.clear()
    return taken


def end_at_once(number: int) -> None:
    """The exit code says by which signal. The engine notices, and ends itself."""
    os._exit(128 + number)


@contextmanager
def held() -> Iterator[None]:
    """Within the block there is an engine to be ended in order, and somebody (`take`) who will do so. SIGHUP, which
    asks for the keys to be read again, says nothing while they are read for the first time."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in NUMBERS:
        signal.signal(number, _note)
    try:
        yield
    finally:
        for number in NUMBERS:
            signal.signal(number, _end)


def _note(number: int, frame: FrameType | None) -> None:
    if _noted:
        end_at_once(number)
    _noted.append(number)


def _end(number: int, frame: FrameType | None) -> None:
    end_at_once(number)
