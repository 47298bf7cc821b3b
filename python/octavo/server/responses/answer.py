"""A response object and the stream events that build it, from the events of its turns.

Every change is an event, numbered in order; the object always holds what the events said so far. Not here: who runs the
turns (run.py).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict
from typing import Any

from octavo.sampling_params import SamplingParams
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError, message_of
from octavo.server.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
    TurnEvent,
)
from octavo.server.logprobs import Row, chat_entries
from octavo.server.responses.items import new_id, sealed
from octavo.server.responses.tools import Toolbox, free_input
from octavo.server.schema.responses import ResponsesRequest

Event = dict[str, Any]
Item = dict[str, Any]

# Status of an error answer -> the code of a failed response.
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def response_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's Responses usage, the sum over turns."""

    def total(name: str, details: str = "") -> int:
        return sum((usage.get(details) or {} if details else usage).get(name, 0) for usage in usages)

    return {
        "input_tokens": total("prompt_tokens"),
        "input_tokens_details": {
            "cached_tokens": total("cached_tokens", "prompt_tokens_details"),
            "cache_write_tokens": 0,
        },
        "output_tokens": total("completion_tokens"),
        "output_tokens_details": {"reasoning_tokens": total("reasoning_tokens", "completion_tokens_details")},
        "total_tokens": total("total_tokens"),
    }


def new_response(wanted: ResponsesRequest, params: SamplingParams, box: Toolbox, *, model: str, store: bool) -> Item:
    """A response object before anything was said."""
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if wanted.background else "in_progress",
        "background": wanted.background,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": wanted.instructions,
        "max_output_tokens": wanted.max_output_tokens,
        "max_tool_calls": wanted.max_tool_calls,
        "metadata": wanted.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": wanted.parallel_tool_calls,
        "previous_response_id": wanted.previous_response_id,
        "prompt_cache_key": wanted.prompt_cache_key,
        "reasoning": {"effort": wanted.reasoning.effort if wanted.reasoning else None, "summary": None},
        "safety_identifier": wanted.safety_identifier,
        "service_tier": "default",
        "store": store,
        "temperature": params.temperature,
        "text": _text_config(wanted),
        "tool_choice": wanted.tool_choice or "auto",
        "tools": box.echo,
        "top_logprobs": wanted.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": wanted.truncation,
        "usage": None,
        "user": wanted.user,
    }


def _text_config(wanted: ResponsesRequest) -> Item:
    text = wanted.text
    given = {} if text is None or text.format is None else asdict(text.format)
    shown = {key: value for key, value in given.items() if value is not None} or {"type": "text"}
    return {"format": shown, "verbosity": (text.verbosity if text else None) or "medium"}


class ResponseWriter:
    """Builds one response object.

    Args:
        response: As `new_response` made it; changed in place.
        seals_reasoning: Reasoning items also carry `encrypted_content`.
        custom: Names of tools whose calls have text in place of arguments.
    """

    def __init__(
        self,
        context: ServerContext,
        response: Item,
        *,
        logprobs: bool,
        seals_reasoning: bool,
        custom: Set[str] = frozenset(),
    ) -> None:
        self.response = response
        self._custom = custom
        self._context = context
        self._logprobs = logprobs
        self._seals_reasoning = seals_reasoning
        self._next_number = 0
        self._item: Item | None = None
        """The item that is being written; not in `output` yet."""
        self._pieces: list[str] = []
        self._rows: list[Row] = []

    def event(self, kind: str, **data: Any) -> Event:
        """A numbered event."""
        number = self._next_number
        self._next_number += 1
        return {"type": kind, "sequence_number": number, **data}

    def state(self, kind: str) -> Event:
        """An event that carries the whole object as it is now."""
        snapshot = {**self.response, "output": list(self.response["output"])}
        return self.event(f"response.{kind}", response=snapshot)

    def begin(self) -> Iterator[Event]:
        """The first events; a background response has said "queued" before."""
        if not self._next_number:
            yield self.state("created")
        self.response["status"] = "in_progress"
        yield self.state("in_progress")

    def queue(self) -> Iterator[Event]:
        """The first events of a background response."""
        yield self.state("created")
        yield self.state("queued")

    def write(self, event: TurnEvent) -> Iterator[Event]:
        """What a turn said; its end says nothing yet, as another turn may follow."""
        if isinstance(event, ContentDelta):
            yield from self._text(event)
        elif isinstance(event, ReasoningDelta):
            yield from self._open_part("reasoning", {"summary": [], "content": []}, {"type": "reasoning_text"})
            self._pieces.append(event.text)
            yield self.in_item("response.reasoning_text.delta", content_index=0, delta=event.text)
        elif isinstance(event, ToolCallStart):
            yield from self.close_item()
            kind, said = ("custom_tool_call", "input") if event.name in self._custom else ("function_call", "arguments")
            yield from self.open_item(kind, call_id=event.id, name=event.name, **{said: ""})
        elif isinstance(event, ToolCallDelta):
            self._pieces.append(event.arguments)
            if self._item is not None and self._item["type"] == "function_call":
                yield self.in_item("response.function_call_arguments.delta", delta=event.arguments)

    def _text(self, event: ContentDelta) -> Iterator[Event]:
        if not event.text and self._item is None:
            return
        if event.text:
            part = {"type": "output_text", "annotations": [], "logprobs": []}
            yield from self._open_part("message", {"role": "assistant", "content": []}, part)
        assert self._item is not None
        rows = event.rows if self._logprobs and self._item["type"] == "message" else None
        self._rows += rows or ()
        if event.text:
            self._pieces.append(event.text)
            entries = chat_entries(self._context.token_names, rows or ())
            yield self.in_item("response.output_text.delta", content_index=0, delta=event.text, logprobs=entries)

    def _open_part(self, kind: str, fields: Item, part: Item) -> Iterator[Event]:
        """Open an item of one content part, unless it is open."""
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self.close_item()
        yield from self.open_item(kind, **fields)
        yield self.in_item("response.content_part.added", content_index=0, part={**part, "text": ""})

    def open_item(self, kind: str, **fields: Any) -> Iterator[Event]:
        """Start an item of the output."""
        self._item = {"type": kind, "id": new_id(kind), "status": "in_progress", **fields}
        self._pieces, self._rows = [], []
        yield self.event("response.output_item.added", output_index=len(self.response["output"]), item=dict(self._item))

    def in_item(self, kind: str, **data: Any) -> Event:
        """An event about the open item."""
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self.response["output"])}
        return self.event(kind, **place, **data)

    def fill(self, **fields: Any) -> None:
        """Fields of the open item, told when it is closed."""
        assert self._item is not None
        self._item.update(fields)

    def close_item(self, status: str = "completed") -> Iterator[Event]:
        """End the open item, if there is one: it is part of the output then."""
        item = self._item
        if item is None:
            return
        text = "".join(self._pieces)
        close = _CLOSERS.get(item["type"])
        if close is not None:
            yield from close(self, item, text)
        item["status"] = status
        yield self.event("response.output_item.done", output_index=len(self.response["output"]), item=item)
        self.response["output"].append(item)
        self._item = None

    def _close_message(self, item: Item, text: str) -> Iterator[Event]:
        entries = chat_entries(self._context.token_names, self._rows)
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}
        yield self.in_item("response.output_text.done", content_index=0, text=text, logprobs=entries)
        yield self.in_item("response.content_part.done", content_index=0, part=part)
        item["content"] = [part]

    def _close_reasoning(self, item: Item, text: str) -> Iterator[Event]:
        part = {"type": "reasoning_text", "text": text}
        yield self.in_item("response.reasoning_text.done", content_index=0, text=text)
        yield self.in_item("response.content_part.done", content_index=0, part=part)
        item["content"] = [part]
        if self._seals_reasoning:
            item["encrypted_content"] = sealed(text)

    def _close_call(self, item: Item, text: str) -> Iterator[Event]:
        yield self.in_item("response.function_call_arguments.done", arguments=text, name=item["name"])
        item["arguments"] = text

    def _close_custom(self, item: Item, arguments: str) -> Iterator[Event]:
        """The text comes in one piece, as it is only known once the JSON around it is complete."""
        text = free_input(arguments)
        yield self.in_item("response.custom_tool_call_input.delta", delta=text)
        yield self.in_item("response.custom_tool_call_input.done", input=text)
        item["input"] = text

    def finish(self, reason: str, usages: Sequence[dict[str, Any]]) -> Iterator[Event]:
        """The last events after a turn that ended for `reason`."""
        cut = reason == "length"
        yield from self.close_item("incomplete" if cut else "completed")
        status = "incomplete" if cut else "completed"
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._end(status, usages)

    def fail(self, error: ApiError, usages: Sequence[dict[str, Any]]) -> Iterator[Event]:
        """The last events after an error."""
        yield from self.close_item("incomplete")
        code = ERROR_CODES.get(error.status, "server_error")
        self.response["error"] = {"code": code, "message": message_of(error)}
        yield self._end("failed", usages)

    def cancel(self) -> None:
        """End without an event: nobody gets one any more."""
        for _ in self.close_item("incomplete"):
            pass
        self.response["status"] = "cancelled"

    def _end(self, status: str, usages: Sequence[dict[str, Any]]) -> Event:
        self.response["status"] = status
        self.response["usage"] = response_usage(usages)
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        return self.state(status)


_CLOSERS = {
    "message": ResponseWriter._close_message,
    "reasoning": ResponseWriter._close_reasoning,
    "function_call": ResponseWriter._close_call,
    "custom_tool_call": ResponseWriter._close_custom,
}
