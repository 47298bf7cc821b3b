"""An assistant's turn: encodes the conversation, runs it, and tells what the model says as `TurnEvent`s.

Every API shape (chat completions, Responses, Messages) stands on this. Not here: how reasoning and calls are told from
text (reasoning/, tools/), and how events are written (routes).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.server.chunks import Piece, merge
from octavo.server.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
    TurnEnd,
    TurnEvent,
    TurnMessage,
    TurnRequest,
)
from octavo.server.generation import Generation, Prompt
from octavo.server.logprobs import Row

if TYPE_CHECKING:
    from octavo.server.context import ServerContext


class Turn:
    """One request for a turn, submitted on construction; iterate `events` once, and `close` always.

    `start` is the usual way to make one.
    """

    def __init__(self, context: ServerContext, request: TurnRequest, token_ids: list[int]) -> None:
        self.request = request
        self.generation = Generation(
            context,
            [Prompt(token_ids, None)],
            request.params,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        self.prompt_rows: list[Row] = []
        """Log probabilities of the prompt's tokens but the first, once the first output has come; when asked for."""
        self._plain = request.params.logprobs is None and not request.return_token_ids

    @classmethod
    async def start(cls, context: ServerContext, request: TurnRequest, *, size_bytes: int) -> Turn:
        """Encode the messages (in a thread when `size_bytes`, the body's size, says that it takes long) and submit.

        Raises:
            RequestError: The messages, the tools or the parameters don't fit the model; nothing was submitted.
            UnavailableError: The server drains.
        """
        token_ids = await prompt_token_ids(context, request, size_bytes=size_bytes)
        return cls(context, _fitted(request, context.facts.max_model_len - len(token_ids)), token_ids)

    @property
    def num_choices(self) -> int:
        return self.generation.num_choices

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, for what has come so far."""
        return self.generation.usage()

    async def events(self) -> AsyncIterator[list[TurnEvent]]:
        """What the turn brings, as it comes: lists that are never empty. Ends after every choice's `TurnEnd`."""
        async for _, deltas in self.generation.batches():
            events: list[TurnEvent] = []
            for delta in merge(deltas, self._plain) if len(deltas) > 1 else deltas:
                self._read(delta, events)
            if events:
                yield events

    def _read(self, delta: Piece, events: list[TurnEvent]) -> None:
        choice = delta.index
        if self._plain:
            if delta.text:
                events.append(ContentDelta(choice, delta.text))
        elif delta.text or delta.token_ids:
            token_ids = delta.token_ids if self.request.return_token_ids else ()
            events.append(ContentDelta(choice, delta.text, delta.logprobs, token_ids))
        if delta.prompt_logprobs is not None:
            self.prompt_rows = delta.prompt_logprobs
        if delta.finish_reason is not None:
            events.append(TurnEnd(choice, delta.finish_reason, delta.stop_reason))

    def close(self) -> None:
        """Abort what still runs."""
        self.generation.close()


async def prompt_token_ids(context: ServerContext, request: TurnRequest, *, size_bytes: int) -> list[int]:
    """The prompt that a turn would submit. `RequestError` when the messages or the tools don't fit the model."""
    return await context.run_text(_encode, context, request, size_bytes=size_bytes)


def _fitted(request: TurnRequest, room: int) -> TurnRequest:
    """With `fit_context`, no more new tokens than there is room for."""
    params = request.params
    if request.fit_context and params.max_tokens is not None and max(params.min_tokens, 1) <= room < params.max_tokens:
        return replace(request, params=replace(params, max_tokens=room))
    return request


def _encode(context: ServerContext, request: TurnRequest) -> list[int]:
    return context.encoder.encode_chat(request.messages, **request.template_options)


async def collect(turn: Turn) -> list[TurnMessage]:
    """Wait for the end of the turn: its choices in one piece each."""
    messages = [TurnMessage() for _ in range(turn.num_choices)]
    async for events in turn.events():
        for event in events:
            _add(messages[event.choice], event)
    return messages


def _add(message: TurnMessage, event: TurnEvent) -> None:
    if isinstance(event, ContentDelta):
        message.content += event.text
        message.rows += event.rows or ()
        message.token_ids += event.token_ids
    elif isinstance(event, ReasoningDelta):
        message.reasoning += event.text
    elif isinstance(event, ToolCallStart):
        message.tool_calls.append(ToolCall(event.id, event.name, ""))
    elif isinstance(event, ToolCallDelta):
        message.tool_calls[event.call].arguments += event.arguments
    else:
        message.finish_reason, message.stop_reason = event.finish_reason, event.stop_reason
