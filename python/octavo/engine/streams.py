"""A request's output as an async iterator: batches of deltas, as the engine's frames bring them.

Not here: how deltas become `RequestOutput`s (outputs.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from octavo._core import Delta


class Stream:
    """`async for deltas in stream` yields what came since the last time, and ends when all sequences have ended.

    Leaving the loop early, by break, exception or cancellation, aborts the request, and so does `close`. Raises
    OverloadError or RequestError when the engine refuses the request, EngineDeadError when the engine dies. Everything
    runs in the event loop's thread.
    """

    __slots__ = ("_batch", "_error", "_finished", "_on_end", "_waiter", "number", "request_id")

    def __init__(self, request_id: str, on_end: Callable[[Stream], None]) -> None:
        self.request_id = request_id
        self.number = 0
        """The request's number on its connection."""
        self._on_end = on_end
        self._batch: list[Delta] = []
        self._error: Exception | None = None
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None

    def push(self, delta: Delta) -> None:
        self._batch.append(delta)
        self._wake()

    def finish(self, error: Exception | None) -> None:
        if not self._finished:
            self._finished = True
            self._error = error
            self._on_end(self)
            self._wake()

    def fail(self, error: Exception) -> None:
        """Abort, whatever has not been read yet: the reader gets the error next."""
        self._batch.clear()
        self._error = error
        self.finish(error)

    def close(self) -> None:
        """Abort unless it has ended; no delta comes after this."""
        self._batch.clear()
        self.finish(None)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        try:
            while True:
                if not self._batch and not self._finished:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
                    self._waiter = None
                batch, self._batch = self._batch, []
                if batch:
                    yield batch
                elif self._error is not None:
                    raise self._error
                elif self._finished:
                    return
        finally:
            self.close()
