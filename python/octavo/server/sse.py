"""A stream of server-sent events as a Starlette response, and the watch for clients that leave.

Headers are sent with the first event: a request that the engine refuses still gets its own status. Not here: what the
events say (chunks.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import last_event, to_api_error

T = TypeVar("T")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads the answer."""


async def _watch(receive: Receive, on_gone: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, cancelled when the client leaves (`ClientGoneError`)."""
    task = asyncio.current_task()
    assert task is not None
    watcher = asyncio.create_task(_watch(receive, task.cancel))
    try:
        return await work
    except asyncio.CancelledError:
        if not watcher.done() or watcher.cancelled():
            raise
        task.uncancel()
        raise ClientGoneError from None
    finally:
        watcher.cancel()


class EventStream(Response):
    """Sends events as they come; `on_close` always runs at the end.

    An error before the first event is raised (and becomes an ordinary error answer); a later one is sent as a last
    event in the shape of the request's API, and the stream ends without [DONE].
    """

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._pump(scope, send))
        except ClientGoneError:
            pass
        finally:
            self._on_close()

    async def _pump(self, scope: Scope, send: Send) -> None:
        first = await anext(self._events, "")  # a follower of what has ended may have missed nothing
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        await send({"type": "http.response.body", "body": first.encode(), "more_body": True})
        last = b""
        try:
            async for events in self._events:
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
        except Exception as error:
            last = last_event(to_api_error(error), scope)
        await send({"type": "http.response.body", "body": last, "more_body": False})
