"""uvicorn's HTTP protocol with the limits that it does not have itself: heads, slow clients, connections.

Not here: the size of bodies (middleware.py), what a request asks for (schema/).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.server.errors import ApiError, UnavailableError, error_response


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Of one server. A client beyond them gets an answer, where one can be given, and is hung up on."""

    max_connections: int = 8192
    max_head_bytes: int = 64 * 1024
    max_headers: int = 128
    head_timeout_s: float = 20.0
    """From the connection, or a request's first byte, to the end of its head."""
    body_window_s: float = 30.0
    """A body that has not ended must bring at least `min_body_bytes` in every such window."""
    min_body_bytes: int = 1024
    stall_timeout_s: float = 120.0
    """A client that reads nothing while an answer waits for it."""
    flush_timeout_s: float = 2.0
    """When the server ends: how long clients get to take the last bytes."""


def _answer(error: ApiError, scope: Scope) -> bytes:
    """A whole answer, after which the connection is closed."""
    response = error_response(error, scope)
    lines = [b"%b: %b" % header for header in response.raw_headers]
    start = f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()
    return b"\r\n".join([start, *lines, b"connection: close", b"", bytes(response.body)])


def _without_chunks(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 has no chunks (RFC 9112, 7.1), which uvicorn would send: an answer of unknown length ends with its
    connection."""
    send: Any = cycle.send
    has_length = True

    async def send_plainly(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            has_length = b"content-length" in names
            if not has_length:
                cycle.chunked_encoding, cycle.keep_alive = False, False
        elif message["type"] == "http.response.body" and not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plainly  # type: ignore[assignment, method-assign]


class LimitedHttpProtocol(HttpToolsProtocol):
    """`limits` by keyword, through functools.partial."""

    def __init__(self, *args: Any, limits: HttpLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._in_head = False
        self._is_refused = False
        self._head_bytes = 0
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            message = f"{self._limits.max_connections} connections are open (--max-connections); try again later"
            self._refuse(UnavailableError(message))
            return
        self._arm(self._limits.head_timeout_s, self._slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        for timer in (self._stall, self._flush):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends. Hung up on, a handler that waits for its client ends like one whose client has left."""
        super().shutdown()
        self._flush = self.loop.call_later(self._limits.flush_timeout_s, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse_head(f"the request's headers have more than {self._limits.max_head_bytes} bytes")

    def send_400_response(self, msg: str) -> None:
        """What the parser can't read: uvicorn would answer in plain text."""
        message = f"{msg.rstrip('.')}: check its method, its URL, its headers and the length of its body"
        self._refuse(ApiError(400, message, code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """There are no upgrades here: the request is answered as it is, and that is no news for the log."""

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._arm(self._limits.head_timeout_s, self._slow_head)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= self._limits.max_headers:
            self._refuse_head(f"the request has more than {self._limits.max_headers} headers")
        if not self._is_refused:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._is_refused:
            return
        self._body_bytes = 0
        self._arm(self._limits.body_window_s, self._check_body)
        super().on_headers_complete()
        if self.cycle is not None and self.scope["http_version"] == "1.0":
            _without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm()
        if not self._is_refused:
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self._limits.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        super().resume_writing()

    def _arm(self, delay_s: float, then: Any) -> None:
        self._disarm()
        self._timer = self.loop.call_later(delay_s, then)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _slow_head(self) -> None:
        message = f"the request's head did not end within {self._limits.head_timeout_s:g} s"
        self._refuse(ApiError(408, message, code="too_slow"))

    def _check_body(self) -> None:
        if self._body_bytes >= self._limits.min_body_bytes:
            self._body_bytes = 0
            self._arm(self._limits.body_window_s, self._check_body)
            return
        if self.cycle is not None and self.cycle.response_started:
            return  # it was answered without its body: the end of the answer closes the connection
        limits = self._limits
        message = f"the body came with less than {limits.min_body_bytes} bytes in {limits.body_window_s:g} s"
        self._refuse(ApiError(408, message, code="too_slow"))

    def _refuse_head(self, message: str) -> None:
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def _refuse(self, error: ApiError) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._disarm()
        self.transport.write(_answer(error, self._known_scope()))
        self.transport.close()

    def _known_scope(self) -> Scope:
        """What has come of the request's head: it says which API's words the answer is in."""
        if self.scope is None:  # not a byte has come
            return {"path": "", "headers": []}
        return {"path": self.url.partition(b"?")[0].decode("latin-1"), "headers": self.headers}
