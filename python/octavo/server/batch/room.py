"""How many requests of batches may run: what others leave free, never the last quarter of the engine's slots.

A request of a batch that runs is not taken back, so this is what keeps batches out of the way under every scheduling
policy; under --scheduling-policy priority they are the least urgent as well.
"""

from __future__ import annotations

import asyncio
import contextlib

from octavo.server.context import ServerContext

LOOK_S = 0.1


class Room:
    """Requests enter in the order in which they come, when there is room."""

    def __init__(self, context: ServerContext, most: int) -> None:
        self._context = context
        self._most = most
        self._num_inside = 0
        self._door = asyncio.Lock()
        self._left = asyncio.Event()

    async def enter(self) -> None:
        """Wait for room; `leave` must follow."""
        async with self._door:
            while not self._has_room():
                self._left.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._left.wait(), LOOK_S)
            self._num_inside += 1

    def leave(self) -> None:
        self._num_inside -= 1
        self._left.set()

    def _has_room(self) -> bool:
        if self._context.state != "ready":
            return False
        num_slots = self._context.facts.max_num_seqs
        num_others = max(0, len(self._context.live.calls) - self._num_inside)
        return self._num_inside < min(self._most, max(1, num_slots * 3 // 4) - num_others)
