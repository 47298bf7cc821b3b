"""A turn's events as Anthropic's stream events, and the whole message as those events applied to an empty one.

One state machine serves both, so that a streamed answer and one in one piece hold the same blocks.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from octavo.server.errors import UnavailableError
from octavo.server.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
    TurnEnd,
    TurnEvent,
)
from octavo.server.schema.words import all_renamed
from octavo.server.turn import Turn

Event = dict[str, Any]
"""Data of a stream event; its `type` is also the event's name."""

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING: Event = {"type": "ping"}


def usage_of(usage: dict[str, Any]) -> dict[str, int]:
    """Anthropic's usage from OpenAI's: the input without what came from the cache, which is counted apart."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def signature_of(thinking: str) -> str:
    """A thinking block's signature: clients send it back as it is; it says nothing to this server."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


class MessageWriter:
    """Writes the one choice of a turn.

    Args:
        max_tokens: What the request asked for; a shorter answer that ended for its length filled the context.
        shows_thinking: Else thinking blocks are there, without text.
        words: The engine's names of fields -> those of the request, for errors.
    """

    def __init__(
        self, turn: Turn, *, id: str, model: str, max_tokens: int, shows_thinking: bool, words: Mapping[str, str]
    ) -> None:
        self._turn = turn
        self._words = words
        self._id = id
        self._model = model
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._num_blocks = 0
        self._open: str | None = None
        """Type of the block that is being written."""
        self._thinking: list[str] = []

    async def sse(self) -> AsyncIterator[str]:
        """The stream, several events at a time when the client is slower than the engine."""
        async for events in self.events():
            yield "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)

    async def message(self) -> dict[str, Any]:
        """The whole answer."""
        message: dict[str, Any] = {}
        async for events in self.events():
            for event in events:
                _apply(message, event)
        return message

    async def events(self) -> AsyncIterator[list[Event]]:
        """Everything from message_start to message_stop."""
        started = False
        async for batch in all_renamed(self._turn.events(), self._words):
            events = [event for item in batch for event in self._write(item)]
            if not started:
                events.insert(0, self._start())
                started = True
            yield events

    def _start(self) -> Event:
        message: Event = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(self._turn.usage()),
        }
        return {"type": "message_start", "message": message}

    def _write(self, event: TurnEvent) -> Iterator[Event]:
        if isinstance(event, ContentDelta):
            if event.text:
                yield from self._grow("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, ReasoningDelta):
            yield from self._grow("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.append(event.text)
            if self._shows_thinking:
                yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, ToolCallStart):
            yield from self._close()
            yield from self._grow("tool_use", {"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
        elif isinstance(event, ToolCallDelta):
            yield self._delta({"type": "input_json_delta", "partial_json": event.arguments})
        else:
            yield from self._end(event)

    def _grow(self, kind: str, block: Event) -> Iterator[Event]:
        """Open a block unless one of its kind is open."""
        if self._open == kind:
            return
        yield from self._close()
        yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        if self._num_blocks == 0:
            yield PING
        self._open = kind
        self._num_blocks += 1

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature_of("".join(self._thinking))})
            self._thinking.clear()
        yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._open = None

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _end(self, end: TurnEnd) -> Iterator[Event]:
        if end.finish_reason not in STOP_REASONS:
            raise UnavailableError("the request was ended by the server")
        yield from self._close()
        usage = usage_of(self._turn.usage())
        reason, sequence = STOP_REASONS[end.finish_reason], None
        if reason == "end_turn" and isinstance(end.stop_reason, str):
            reason, sequence = "stop_sequence", end.stop_reason
        if reason == "max_tokens" and usage["output_tokens"] < self._max_tokens:
            reason = "model_context_window_exceeded"
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage,
        }
        yield {"type": "message_stop"}


def _apply(message: dict[str, Any], event: Event) -> None:
    """Advance a message by one event, as a client does."""
    kind = event["type"]
    if kind == "message_start":
        message.update(event["message"])
    elif kind == "content_block_start":
        message["content"].append(dict(event["content_block"]))
    elif kind == "content_block_delta":
        block = message["content"][-1]
        for key, text in event["delta"].items():
            if key != "type":
                block[key] = block.get(key, "") + text
    elif kind == "content_block_stop":
        block = message["content"][-1]
        if block["type"] == "tool_use":
            block["input"] = _object(block.pop("partial_json", ""))
    elif kind == "message_delta":
        message.update(event["delta"])
        message["usage"] = event["usage"]


def _object(text: str) -> dict[str, Any]:
    """A call's arguments; a call that was cut short (the stop reason says so) has none."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
