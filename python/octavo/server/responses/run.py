"""Runs one response: its turn, the events that come of it, and its end, whether somebody listens or not.

Not here: what events say (answer.py), what is kept (store.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from octavo.server.context import ServerContext
from octavo.server.errors import UnavailableError, to_api_error
from octavo.server.events import TurnEnd, TurnRequest
from octavo.server.responses.answer import Event, ResponseWriter
from octavo.server.responses.store import Kept
from octavo.server.responses.truncate import drop_oldest
from octavo.server.schema.responses import WORDS
from octavo.server.schema.words import renamed
from octavo.server.turn import Turn

ENDS = ("stop", "length", "tool_calls")


class ResponseRun:
    """One response from its first turn to its end; `start` once, iterate once, and `close` always.

    Args:
        truncates: Leave out the oldest turns of a conversation that is too long.
    """

    def __init__(
        self,
        context: ServerContext,
        request: TurnRequest,
        writer: ResponseWriter,
        *,
        truncates: bool,
        size_bytes: int,
    ) -> None:
        self.writer = writer
        self._context = context
        self._request = request
        self._truncates = truncates
        self._size_bytes = size_bytes
        self._turn: Turn | None = None
        self._usages: list[dict[str, Any]] = []

    async def start(self) -> None:
        """Submit the first turn. Errors as of `Turn.start`, in the words of this API."""
        with renamed(WORDS):
            if self._truncates:
                self._request = await drop_oldest(self._context, self._request, size_bytes=self._size_bytes)
            self._turn = await Turn.start(self._context, self._request, size_bytes=self._size_bytes)

    async def events(self) -> AsyncIterator[list[Event]]:
        """Everything after the start; raises what the turn raises."""
        begun = False
        reason = ""
        turn = self._turn
        assert turn is not None, "start comes first"
        async for batch in turn.events():
            events = [] if begun else list(self.writer.begin())
            begun = True
            for event in batch:
                if isinstance(event, TurnEnd):
                    reason = event.finish_reason
                events += self.writer.write(event)
            yield events
        self._usages.append(turn.usage())
        if reason not in ENDS:
            raise UnavailableError("the response was ended by the server")
        yield list(self.writer.finish(reason, self._usages))

    async def told(self) -> AsyncIterator[list[Event]]:
        """The same, where an error after the first event is told by the last event."""
        begun = False
        try:
            async for events in self.events():
                begun = True
                yield events
        except Exception as error:
            if not begun:
                raise
            yield list(self.writer.fail(to_api_error(error), self._usages))

    async def sse(self) -> AsyncIterator[str]:
        """`told` as server-sent events."""
        async for events in self.told():
            yield "".join(sse_event(event) for event in events)

    async def response(self) -> dict[str, Any]:
        """The whole object. An error is raised."""
        async for _ in self.events():
            pass
        return self.writer.response

    async def in_background(self, kept: Kept, started: asyncio.Future[None]) -> None:
        """Do the work of a background response: `started` tells whether it was accepted, the log everything else."""
        log = kept.log
        assert log is not None

        def tell(events: list[Event]) -> None:
            for event in events:
                log.add(sse_event(event))

        try:
            tell(list(self.writer.queue()))
            try:
                await self.start()
            except Exception as error:
                started.set_exception(error)
                return
            started.set_result(None)
            try:
                async for events in self.events():
                    tell(events)
            except Exception as error:
                tell(list(self.writer.fail(to_api_error(error), self._usages)))
        except asyncio.CancelledError:
            self.writer.cancel()
        finally:
            self.close()
            log.close()
            self._context.responses.settle(kept)

    def close(self) -> None:
        """Abort what still runs."""
        if self._turn is not None:
            self._turn.close()


def sse_event(event: Event) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
