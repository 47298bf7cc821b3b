"""Answers in one piece: collects a generation's choices. Their JSON is made by the routes."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.server.generation import Generation
from octavo.server.logprobs import Row


@dataclass(slots=True)
class Choice:
    """One finished sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    """Log probabilities, one a token, when asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Collected:
    """All choices of a call, in order, and the prompts' log probabilities by prompt."""

    choices: list[Choice]
    prompt_rows: dict[int, list[Row]]


async def collect(generation: Generation) -> Collected:
    """Wait for the end of all sequences."""
    choices = [Choice() for _ in range(generation.num_choices)]
    texts: list[list[str]] = [[] for _ in choices]
    prompt_rows: dict[int, list[Row]] = {}
    async for prompt, deltas in generation.batches():
        for delta in deltas:
            number = prompt * generation.n + delta.index
            choice = choices[number]
            texts[number].append(delta.text)
            choice.token_ids += delta.token_ids
            if delta.logprobs is not None:
                choice.rows += delta.logprobs
            if delta.prompt_logprobs is not None:
                prompt_rows[prompt] = delta.prompt_logprobs
            if delta.finish_reason is not None:
                choice.finish_reason = delta.finish_reason
                choice.stop_reason = delta.stop_reason
    for choice, pieces in zip(choices, texts, strict=True):
        choice.text = "".join(pieces)
    return Collected(choices, prompt_rows)
