"""One connection to a running engine: frames on a unix socket, the requests and calls in flight on it.

It lives as long as the engine process does; what outlives it (restarts, the public state) is client.py. Everything runs
in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import Callable
from typing import Any, cast

from octavo._core import EngineStats, OutputProcessor, Tokenizer, encode_call
from octavo.engine.request import EngineRequest
from octavo.engine.router import FrameRouter
from octavo.engine.streams import Stream
from octavo.errors import DeadlineError, EngineDeadError, OctavoError, OverloadError, RequestError
from octavo.protocol import ModelFacts

PREFIX_BYTES = 4
REFUSALS: dict[str, type[OverloadError]] = {"overload": OverloadError, "deadline": DeadlineError}


class FrameProtocol(asyncio.Protocol):
    """Cuts the byte stream into frame bodies (u32 little-endian length, then the body)."""

    def __init__(self, on_frame: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._rest = bytearray()
        self._num_needed = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """A frame that arrives whole, the usual case, is copied once."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._num_needed:
                return
            data = bytes(self._rest)
            self._rest.clear()
        start = 0
        while (end := _frame_end(data, start)) <= len(data):
            self._on_frame(data[start + PREFIX_BYTES : end])
            start = end
        if start < len(data):
            self._rest += data[start:]
            self._num_needed = end - start

    def send(self, body: bytes) -> None:
        assert self._transport is not None
        self._transport.write(len(body).to_bytes(PREFIX_BYTES, "little") + body)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()


def _frame_end(data: bytes, start: int) -> int:
    """Where the frame at `start` ends; beyond the data when it has not arrived whole."""
    body = start + PREFIX_BYTES
    return body if len(data) < body else body + int.from_bytes(data[start:body], "little")


class EngineConnection:
    """First `connect`, then `open`; then `submit`, `abort` and `call` until the socket ends and `on_lost` is called."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self.stats: EngineStats | None = None
        self.drained = asyncio.Event()
        """Set whenever the last request ends; whoever waits for it clears it first."""
        self._on_lost = on_lost
        self._is_lost = False
        self._protocol = FrameProtocol(self._on_frame, self._lost)
        self._router: FrameRouter | None = None
        self._streams: dict[str, Stream] = {}
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._call_ids = itertools.count(1)
        self._hello: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def connect(self, socket_path: str) -> ModelFacts:
        """Connect and take the hello. OSError or EngineDeadError when the engine is gone already."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._protocol, socket_path)
        return ModelFacts.from_json(await self._hello)

    def open(self, facts: ModelFacts, tokenizer: Tokenizer | None) -> None:
        """Take requests from now on. EngineDeadError when the engine has gone since `connect`: nobody would be told."""
        if self._is_lost:
            raise EngineDeadError("the engine process ended before it was ready")
        self._router = FrameRouter(facts, tokenizer, self._protocol.send, self.drained.set)

    def close(self) -> None:
        self._protocol.close()

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._streams)

    def submit(self, request: EngineRequest, request_id: str | None) -> Stream:
        """Send a request. RequestError when its id is in use."""
        assert self._router is not None, "open() comes first"
        if request_id is None:
            request_id = secrets.token_hex(12)
        elif request_id in self._streams:
            raise RequestError(f"request_id {request_id!r} is in use by a running request", "request_id")
        stream = Stream(request_id, self._end)
        stream.number = self._router.submit(request, stream)
        self._streams[request_id] = stream
        return stream

    def abort(self, request_id: str) -> bool:
        """End a request; its stream ends with finish reason "abort". False when there is none of that id."""
        assert self._router is not None, "open() comes first"
        stream = self._streams.get(request_id)
        if stream is not None:
            self._router.abort(stream.number)
        return stream is not None

    def _end(self, stream: Stream) -> None:
        """A stream has ended or nobody reads it any more."""
        assert self._router is not None, "open() comes first"
        del self._streams[stream.request_id]
        self._router.drop(stream.number)

    async def call(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """Ask the engine's Python side something between two steps (engine/calls.py). ValueError, OverloadError or
        DeadlineError when it refuses."""
        call_id = next(self._call_ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        self._protocol.send(encode_call(call_id, json.dumps({"name": name, **args}).encode()))
        try:
            values: dict[str, Any] = json.loads(await answer)
        finally:
            del self._calls[call_id]
        if "error" in values:
            if values.get("kind") in REFUSALS:
                raise REFUSALS[values["kind"]](values["error"], values["retry_after_s"])
            raise ValueError(values["error"])
        return values

    def fail(self, error: OctavoError) -> None:
        """The engine is gone: every request and call ends with the error."""
        if self._router is not None:
            self._router.fail_all(error)
        waiting: list[asyncio.Future[Any]] = [self._hello, *self._calls.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # seen: nobody may be waiting

    def _on_frame(self, body: bytes) -> None:
        """ValueError (a malformed frame) closes the connection."""
        if self._router is None:
            if not self._hello.done():  # whoever waited may have been told to stop meanwhile
                self._hello.set_result(OutputProcessor(None, ()).process(body).body)
            return
        frame = self._router.feed(body)
        if frame.stats is not None:
            self.stats = frame.stats
        elif frame.kind == "reply":
            answer = self._calls.get(frame.call_id)
            if answer is not None and not answer.done():
                answer.set_result(frame.body)

    def _lost(self) -> None:
        self._is_lost = True
        self.fail(EngineDeadError("the engine process ended while the request was in flight"))
        self._on_lost()
