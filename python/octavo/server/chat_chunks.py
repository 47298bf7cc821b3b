"""Streamed chat answers: the bytes of every chunk, from a turn's events.

The hot path (plain text) is one string concatenation and one C call that escapes the text. Text is escaped to ASCII, so
that no client splits an event at U+2028 or inside a character.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from octavo.server.chunks import DONE
from octavo.server.events import ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart, TurnEnd, TurnEvent
from octavo.server.logprobs import Row
from octavo.server.schema.sampling import StreamOptions
from octavo.server.turn import Turn

LogprobsOf = Callable[[Sequence[Row]], Any]
"""Rows -> the chunk's `logprobs` value."""

_TAIL = ',"logprobs":null,"finish_reason":null}]}\n\n'


class ChatWriter:
    """Writes the events of one call.

    Args:
        turn: What is written.
        id, created, model: Of every chunk.
        options: Whether usage is told.
        echoed: Text that every choice starts with; "" for none.
        logprobs_of: None when none were asked for.
    """

    def __init__(
        self,
        turn: Turn,
        *,
        id: str,
        created: int,
        model: str,
        options: StreamOptions,
        echoed: str = "",
        logprobs_of: LogprobsOf | None = None,
    ) -> None:
        self._turn = turn
        self._options = options
        self._echoed = echoed
        self._logprobs_of = logprobs_of
        self._tells_usage = options.include_usage and options.continuous_usage_stats
        head = {"id": id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._head = f'data: {json.dumps(head, separators=(",", ":"))[:-1]},"choices":['
        self._heads = [f'{self._head}{{"index":{i},"delta":' for i in range(turn.num_choices)]
        self._content_heads = [f'{head}{{"content":' for head in self._heads]
        self._opened = [False] * turn.num_choices
        self._plain = logprobs_of is None and not turn.request.return_token_ids and not self._tells_usage

    async def sse(self) -> AsyncIterator[str]:
        """The whole stream, several chunks at a time when the client is slower than the engine."""
        async for events in self._turn.events():
            if len(events) == 1:
                yield self._chunks(events[0])
            else:
                yield "".join([self._chunks(event) for event in events])
        tail = DONE
        if self._options.include_usage:
            tail = f'{self._head}],"usage":{self._usage()}}}\n\n{DONE}'
        yield tail

    def _usage(self) -> str:
        return json.dumps(self._turn.usage(), separators=(",", ":"))

    def _chunks(self, event: TurnEvent) -> str:
        choice = event.choice
        opening = "" if self._opened[choice] else self._open(choice)
        if isinstance(event, ContentDelta):
            if self._plain:
                return f"{opening}{self._content_heads[choice]}{quoted(event.text)}}}{_TAIL}"
            return opening + self._detailed(event)
        if isinstance(event, TurnEnd):
            extra = {} if event.stop_reason is None else {"stop_reason": event.stop_reason}
            return opening + self._chunk(choice, "{}", None, event.finish_reason, extra)
        return opening + self._chunk(choice, _delta_of(event))

    def _open(self, choice: int) -> str:
        self._opened[choice] = True
        opening = self._chunk(choice, '{"role":"assistant","content":""}')
        if self._echoed:
            opening += self._chunk(choice, f'{{"content":{quoted(self._echoed)}}}')
        return opening

    def _detailed(self, event: ContentDelta) -> str:
        logprobs = self._logprobs_of(event.rows or ()) if self._logprobs_of is not None else None
        extra = {"token_ids": event.token_ids} if self._turn.request.return_token_ids else {}
        return self._chunk(event.choice, f'{{"content":{quoted(event.text)}}}', logprobs, None, extra)

    def _chunk(
        self,
        choice: int,
        delta: str,
        logprobs: Any = None,
        finish_reason: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> str:
        values = {"logprobs": logprobs, "finish_reason": finish_reason, **(extra or {})}
        rest = json.dumps(values, separators=(",", ":"))
        usage = f',"usage":{self._usage()}' if self._tells_usage else ""
        return f"{self._heads[choice]}{delta},{rest[1:]}]{usage}}}\n\n"


def _delta_of(event: ReasoningDelta | ToolCallStart | ToolCallDelta) -> str:
    """The `delta` object of what is no content. Reasoning has both names that clients know it by."""
    if isinstance(event, ReasoningDelta):
        text = quoted(event.text)
        return f'{{"reasoning":{text},"reasoning_content":{text}}}'
    if isinstance(event, ToolCallStart):
        function = f'{{"name":{quoted(event.name)},"arguments":""}}'
        call = f'{{"index":{event.call},"id":{quoted(event.id)},"type":"function","function":{function}}}'
    else:
        call = f'{{"index":{event.call},"function":{{"arguments":{quoted(event.arguments)}}}}}'
    return f'{{"tool_calls":[{call}]}}'
