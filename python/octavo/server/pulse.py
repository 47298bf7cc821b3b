"""Whether the engine lives: it answered a ping or made steps a short while ago. Asking is cheap and never slow."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from octavo.errors import OctavoError
from octavo.server.metrics import STATS_KEYS

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

# A proof of life is taken as fresh for this long; no answer for longer means a frozen engine, not a long step.
FRESH_S = 1.0
SILENCE_S = 15.0
# How long one question may wait for a proof.
PATIENCE_S = 0.25


class Pulse:
    """Keeps the times of the last proof of life, and of the first question after it."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._num_restarts = 0
        """What follows is of the engine after so many."""
        self._last_s = 0.0
        self._asked_s = 0.0
        """0: it owes no answer."""
        self._num_steps = -1
        self._ping: asyncio.Task[None] | None = None
        self._answer: Mapping[str, float] = {}
        """Its last numbers that were asked for."""

    def _check_engine(self) -> None:
        """Forget what is known of an engine that is gone."""
        if self._num_restarts != self._llm.num_restarts:
            self._num_restarts = self._llm.num_restarts
            self._last_s = self._asked_s = 0.0
            self._answer = {}

    async def beats(self) -> bool:
        """True when the engine is ready and answered within `SILENCE_S`; takes at most `PATIENCE_S`."""
        if self._llm.state not in ("ready", "draining"):
            return False
        self._check_engine()
        stats = self._llm.stats
        if stats is not None and stats.num_steps != self._num_steps:
            self._num_steps = stats.num_steps
            self._lives()
        if self._last_s and time.monotonic() - self._last_s < FRESH_S:
            return True
        self._asked_s = self._asked_s or time.monotonic()
        if self._ping is None or self._ping.done():
            self._ping = asyncio.create_task(self._ask())
        await asyncio.wait({self._ping}, timeout=PATIENCE_S)
        return self.silence_s < SILENCE_S

    def _lives(self) -> None:
        self._last_s = time.monotonic()
        self._asked_s = 0.0

    @property
    def silence_s(self) -> float:
        """For how long it has owed an answer. That nobody asked it for anything before counts for nothing."""
        return time.monotonic() - self._asked_s if self._asked_s else 0.0

    async def stats(self) -> Mapping[str, float]:
        """The engine's numbers: asked for now, or the newest that are known when it is in the middle of a step."""
        self._check_engine()
        if self._llm.state in ("ready", "draining"):
            with contextlib.suppress(OctavoError, TimeoutError):
                self._answer = await asyncio.wait_for(self._llm.call("stats"), PATIENCE_S)
                return self._answer
        frame, numbers = self._llm.stats, self._answer
        if frame is None or (numbers and numbers["num_steps"] >= frame.num_steps):
            return numbers  # when nothing runs there are no frames: the newest one may be old
        return {key: getattr(frame, key) for key in STATS_KEYS}

    async def _ask(self) -> None:
        try:
            await asyncio.wait_for(self._llm.call("ping"), SILENCE_S)
        except (OctavoError, TimeoutError):
            return
        self._lives()
