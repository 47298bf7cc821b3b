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

# A proof of life is taken as fresh for this long; a longer silence means a frozen engine, not a long step.
FRESH_S = 1.0
SILENCE_S = 15.0
# How long one question may wait for a proof.
PATIENCE_S = 0.25


class Pulse:
    """Keeps the time of the last proof of life."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._last_s = 0.0
        self._num_steps = -1
        self._ping: asyncio.Task[None] | None = None
        self._answer: tuple[int, Mapping[str, float]] = (0, {})
        """The engine's last numbers that were asked for, and how many engines it had replaced."""

    async def beats(self) -> bool:
        """True when the engine is ready and answered within `SILENCE_S`; takes at most `PATIENCE_S`."""
        if self._llm.state not in ("ready", "draining"):
            self._last_s = 0.0
            return False
        now_s = time.monotonic()
        if not self._last_s:
            self._last_s = now_s - FRESH_S
        stats = self._llm.stats
        if stats is not None and stats.num_steps != self._num_steps:
            self._num_steps = stats.num_steps
            self._last_s = now_s
        if now_s - self._last_s < FRESH_S:
            return True
        if self._ping is None or self._ping.done():
            self._ping = asyncio.create_task(self._ask())
        await asyncio.wait({self._ping}, timeout=PATIENCE_S)
        return time.monotonic() - self._last_s < SILENCE_S

    @property
    def silence_s(self) -> float:
        """Since the last proof of life; 0 when none was asked for yet."""
        return time.monotonic() - self._last_s if self._last_s else 0.0

    async def stats(self) -> Mapping[str, float]:
        """The engine's numbers: asked for now, or the newest that are known when it is in the middle of a step."""
        if self._llm.state in ("ready", "draining"):
            with contextlib.suppress(OctavoError, TimeoutError):
                told = await asyncio.wait_for(self._llm.call("stats"), PATIENCE_S)
                self._answer = (self._llm.num_restarts, told)
                return told
        frame = self._llm.stats
        num_restarts, numbers = self._answer
        if num_restarts != self._llm.num_restarts:
            numbers = {}  # of an engine that is gone
        if frame is None or (numbers and numbers["num_steps"] >= frame.num_steps):
            return numbers  # when nothing runs there are no frames: the newest one may be old
        return {key: getattr(frame, key) for key in STATS_KEYS}

    async def _ask(self) -> None:
        try:
            await asyncio.wait_for(self._llm.call("ping"), SILENCE_S)
        except (OctavoError, TimeoutError):
            return
        self._last_s = time.monotonic()
