"""Streamed completions as server-sent events: the bytes of every chunk, built from prepared pieces.

The hot path (plain text of one choice) is one string concatenation and one C call that escapes the text. Text is
escaped to ASCII, so that no client splits an event at U+2028 or inside a character.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from octavo._core import Delta
from octavo.server.generation import Generation
from octavo.server.logprobs import Row
from octavo.server.schema.sampling import StreamOptions

DONE = "data: [DONE]\n\n"


class MergedDelta:
    """Several deltas of one choice as one: text and ids joined, the last one's end."""

    __slots__ = ("finish_reason", "index", "num_cached_tokens", "stop_reason", "text", "token_ids")
    logprobs = None
    prompt_logprobs = None

    def __init__(self, deltas: list[Delta]) -> None:
        self.index = deltas[0].index
        self.text = "".join([delta.text for delta in deltas])
        self.token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        self.num_cached_tokens = deltas[0].num_cached_tokens
        self.finish_reason = deltas[-1].finish_reason
        self.stop_reason = deltas[-1].stop_reason


class PartDelta:
    """One token of a delta that has several: the end is the last one's."""

    __slots__ = (
        "finish_reason",
        "index",
        "logprobs",
        "num_cached_tokens",
        "prompt_logprobs",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(self, whole: Delta | MergedDelta | PartDelta, at: int, text: str) -> None:
        is_last = at == len(whole.token_ids) - 1
        self.index: int = whole.index
        self.text = text
        self.token_ids: list[int] = [whole.token_ids[at]]
        self.logprobs: list[Row] | None = None if whole.logprobs is None else [whole.logprobs[at]]
        self.prompt_logprobs: list[Row] | None = whole.prompt_logprobs if at == 0 else None
        self.num_cached_tokens: int | None = whole.num_cached_tokens if at == 0 else None
        self.finish_reason: str | None = whole.finish_reason if is_last else None
        self.stop_reason: int | str | None = whole.stop_reason if is_last else None


Piece = Delta | MergedDelta | PartDelta
LogprobsOf = Callable[[int, Piece], Any]
"""(choice, delta) -> the chunk's `logprobs` value."""
EchoOf = Callable[[int, Piece], tuple[str, Any]]
"""(choice, its first delta) -> the text that the choice starts with, and its logprobs."""


class ChunkWriter:
    """Writes the events of one call.

    Args:
        id, created, model: Of every chunk.
        options: Whether usage is told.
        logprobs_of: None when none were asked for.
        echo: What each choice starts with; None for nothing.
        return_token_ids: Chunks also carry the ids that they brought.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        id: str,
        created: int,
        model: str,
        options: StreamOptions,
        logprobs_of: LogprobsOf | None = None,
        echo: EchoOf | None = None,
        return_token_ids: bool = False,
    ) -> None:
        self._generation = generation
        self._options = options
        self._logprobs_of = logprobs_of
        self._echo = echo
        self._return_token_ids = return_token_ids
        head = json.dumps(
            {"id": id, "object": "text_completion", "created": created, "model": model}, separators=(",", ":")
        )
        self._head = f'data: {head[:-1]},"choices":['
        self._text_heads = [self._choice_head(i) + '"text":' for i in range(generation.num_choices)]
        self._text_tail = ',"logprobs":null,"finish_reason":null}]}\n\n'
        self._opened = [False] * generation.num_choices
        self._plain = logprobs_of is None and not return_token_ids and not options.continuous_usage_stats

    def _choice_head(self, choice: int) -> str:
        return f'{self._head}{{"index":{choice},'

    async def events(self) -> AsyncIterator[str]:
        """The whole stream, several events at a time when the client is slower than the engine."""
        n = self._generation.n
        async for prompt, deltas in self._generation.batches():
            base = prompt * n
            if len(deltas) == 1:
                events = self._delta(base + deltas[0].index, deltas[0])
            else:
                events = "".join(self._delta(base + delta.index, delta) for delta in merge(deltas, self._plain))
            if events:
                yield events
        tail = DONE
        if self._options.include_usage:
            usage = json.dumps(self._generation.usage(), separators=(",", ":"))
            tail = f'{self._head}],"usage":{usage}}}\n\n{DONE}'
        yield tail

    def _delta(self, choice: int, delta: Piece) -> str:
        events = "" if self._opened[choice] else self._open(choice, delta)
        if self._plain:
            if delta.text:
                events += self._text_heads[choice] + encode_basestring_ascii(delta.text) + self._text_tail
        elif delta.text or delta.token_ids:
            events += self._full(choice, delta)
        if delta.finish_reason is not None:
            events += self._close(choice, delta)
        return events

    def _open(self, choice: int, delta: Piece) -> str:
        self._opened[choice] = True
        if self._echo is None:
            return ""
        text, logprobs = self._echo(choice, delta)
        return self._event(choice, f'"text":{encode_basestring_ascii(text)}', logprobs, None)

    def _full(self, choice: int, delta: Piece) -> str:
        body = f'"text":{encode_basestring_ascii(delta.text)}'
        logprobs = None
        if self._logprobs_of is not None:
            logprobs = self._logprobs_of(choice, delta)
        extra = {"token_ids": delta.token_ids} if self._return_token_ids else {}
        return self._event(choice, body, logprobs, None, extra)

    def _close(self, choice: int, delta: Piece) -> str:
        extra = {"stop_reason": delta.stop_reason} if delta.stop_reason is not None else {}
        return self._event(choice, '"text":""', None, delta.finish_reason, extra)

    def _event(
        self, choice: int, body: str, logprobs: Any, finish_reason: str | None, extra: dict[str, Any] | None = None
    ) -> str:
        rest = json.dumps(
            {"logprobs": logprobs, "finish_reason": finish_reason, **(extra or {})}, separators=(",", ":")
        )
        usage = ""
        if self._options.continuous_usage_stats and self._options.include_usage:
            usage = f',"usage":{json.dumps(self._generation.usage(), separators=(",", ":"))}'
        return f"{self._choice_head(choice)}{body},{rest[1:]}]{usage}}}\n\n"


def merge(deltas: list[Delta], plain: bool) -> Sequence[Piece]:
    """One delta a choice, when only text is wanted; else all of them."""
    if not plain:
        return deltas
    by_index: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [MergedDelta(group) for group in by_index.values()]
