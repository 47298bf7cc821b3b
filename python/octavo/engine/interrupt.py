"""Ctrl-C while the engine runs in the caller's process: held back during a step, delivered between two.

A KeyboardInterrupt in the middle of a step would leave the control plane and the device with different ideas of what is
in flight.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Hold SIGINT back; the yielded function runs the caller's own handler if one has come.

    Other threads than the main one never get signals; a handler that is not a Python function needs no care.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    handler = previous
    held: list[tuple[int, FrameType | None]] = []

    def deliver() -> None:
        if held:
            number, frame = held.pop()
            held.clear()
            handler(number, frame)

    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, previous)
    deliver()
