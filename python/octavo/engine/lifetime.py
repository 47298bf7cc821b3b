"""How long an engine inside the caller's process can be used: until it is closed or breaks, not in a forked process,
and not while the interpreter ends.

Not here: engines in a process of their own (client.py).
"""

from __future__ import annotations

import os
import threading
import weakref

from octavo.errors import EngineDeadError

LEAVE_TIMEOUT_S = 10.0
"""Longest wait at the interpreter's end for a thread that generates: it leaves after the step that it is in."""


class Lifetime:
    """Of the engine of `owner`: when the interpreter ends, calls in other threads end first.

    Attributes:
        turns: Held by whoever uses the engine.
        ended_by: Why it is of no use any more.
    """

    def __init__(self, owner: object) -> None:
        self.turns = threading.Lock()
        self.ended_by: str | None = None
        self._pid = os.getpid()
        weakref.finalize(owner, self._leave)

    @property
    def is_here(self) -> bool:
        """Whether this process made the engine: a fork has none of its threads."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """EngineDeadError where it can't be used."""
        if not self.is_here:
            raise EngineDeadError(
                "this engine belongs to the process that this one was forked from: make an LLM after the fork, or "
                "start processes with multiprocessing.get_context('spawn')"
            )
        if self.ended_by is not None:
            raise EngineDeadError(f"this engine can't be used any more: {self.ended_by}")

    def _leave(self) -> None:
        """A daemon thread that came back into a finalizing interpreter would abort the process."""
        if self.is_here:
            self.ended_by = self.ended_by or "the interpreter is ending"
            if self.turns.acquire(timeout=LEAVE_TIMEOUT_S):
                self.turns.release()
