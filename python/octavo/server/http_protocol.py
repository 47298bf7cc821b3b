"""uvicorn's HTTP protocol with the limits that it does not have itself: heads, slow clients, connections.

Not here: the size of bodies (middleware.py), what a request asks for (schema/).
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


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


def _answer(status: str, message: str, code: str, kind: str = "invalid_request_error", more: str = "") -> bytes:
    """A whole answer, after which the connection is closed."""
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n{more}"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


class LimitedHttpProtocol(HttpToolsProtocol):
    """`limits` by keyword, through functools.partial."""

    def __init__(self, *args: Any, limits: HttpLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._in_head = False
        self._is_refused = False
        self._head_bytes = 0
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            message = f"{self._limits.max_connections} connections are open (--max-connections); try again later"
            text = _answer(
                "503 Service Unavailable", message, "unavailable", "service_unavailable", "retry-after: 5\r\n"
            )
            self._refuse(text)
            return
        self._arm(self._limits.head_timeout_s, self._slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._stall is not None:
            self._stall.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse_head(f"the request's headers have more than {self._limits.max_head_bytes} bytes")

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
        self._refuse(_answer("408 Request Timeout", message, "too_slow"))

    def _check_body(self) -> None:
        if self._body_bytes >= self._limits.min_body_bytes:
            self._body_bytes = 0
            self._arm(self._limits.body_window_s, self._check_body)
            return
        if self.cycle is not None and self.cycle.response_started:
            return  # it was answered without its body: the end of the answer closes the connection
        limits = self._limits
        message = f"the body came with less than {limits.min_body_bytes} bytes in {limits.body_window_s:g} s"
        self._refuse(_answer("408 Request Timeout", message, "too_slow"))

    def _refuse_head(self, message: str) -> None:
        self._refuse(_answer("431 Request Header Fields Too Large", message, "headers_too_large"))

    def _refuse(self, answer: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._disarm()
        self.transport.write(answer)
        self.transport.close()
