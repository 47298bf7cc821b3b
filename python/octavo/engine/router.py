"""Engine frames to the requests they belong to: numbers requests, feeds the output processor, hands out deltas.

One router serves one connection to one engine (or `LLM`'s in-process engine). Not here: how frames travel (client.py,
llm.py) and what a request does with its deltas (streams.py, outputs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from octavo._core import Delta, Frame, OutputProcessor, Refusal, Tokenizer, encode_abort
from octavo.engine.request import EngineRequest
from octavo.errors import DeadlineError, OctavoError, OverloadError, RequestError
from octavo.protocol import ModelFacts
from octavo.structured_outputs import PARAM


class Sink(Protocol):
    """Who receives a request's deltas."""

    def push(self, delta: Delta) -> None: ...

    def finish(self, error: OctavoError | None) -> None:
        """Nothing more comes: all sequences ended, or the request failed."""


class _Open:
    """A request that the engine still works on."""

    __slots__ = ("num_running", "sink")

    def __init__(self, sink: Sink, num_running: int) -> None:
        self.sink = sink
        self.num_running = num_running


def refusal_error(refusal: Refusal) -> OctavoError:
    """The exception for a request that the engine did not take."""
    if refusal.kind == "invalid":
        param = PARAM if refusal.message.startswith(PARAM) else None
        return RequestError(refusal.message, param)
    error = DeadlineError if refusal.kind == "deadline" else OverloadError
    return error(refusal.message, refusal.retry_after_s)


class FrameRouter:
    """The requests of one engine connection. `send` takes a frame's body; `on_empty` runs when the last one ends."""

    def __init__(
        self,
        facts: ModelFacts,
        tokenizer: Tokenizer | None,
        send: Callable[[bytes], None],
        on_empty: Callable[[], None] = lambda: None,
    ) -> None:
        self._processor = OutputProcessor(tokenizer, facts.eos_token_ids)
        self._send = send
        self._on_empty = on_empty
        self._open: dict[int, _Open] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._open)

    def submit(self, request: EngineRequest, sink: Sink) -> int:
        """Send a request; its number."""
        request_id = self._next_id
        self._next_id += 1
        frame = request.encode(request_id)
        request.register(self._processor, request_id)
        self._open[request_id] = _Open(sink, request.params.n)
        self._send(frame)
        return request_id

    def feed(self, body: bytes) -> Frame:
        """Take one frame of the engine and hand its deltas and refusals out. ValueError on a malformed frame."""
        frame = self._processor.process(body)
        for delta in frame.deltas:
            entry = self._open[delta.request_id]
            if delta.must_abort:
                self._send(encode_abort(delta.request_id, delta.index))
            entry.sink.push(delta)
            if delta.finish_reason is not None:
                entry.num_running -= 1
                if entry.num_running == 0:
                    self._close(delta.request_id, None)
        for refusal in frame.refusals:
            if refusal.request_id in self._open:
                self._close(refusal.request_id, refusal_error(refusal))
        return frame

    def abort(self, request_id: int) -> None:
        """Ask the engine to end a request; its sink hears of it like of any other end."""
        if request_id in self._open:
            self._send(encode_abort(request_id))

    def drop(self, request_id: int) -> None:
        """End a request that nobody listens to any more."""
        if request_id in self._open:
            self._send(encode_abort(request_id))
            self._close(request_id, None)

    def drop_all(self) -> None:
        for request_id in list(self._open):
            self.drop(request_id)

    def fail_all(self, error: OctavoError) -> None:
        """The engine is gone: every open request ends with the error."""
        for request_id in list(self._open):
            self._close(request_id, error)

    def _close(self, request_id: int, error: OctavoError | None) -> None:
        entry = self._open.pop(request_id)
        self._processor.remove(request_id)
        entry.sink.finish(error)
        if not self._open:
            self._on_empty()
