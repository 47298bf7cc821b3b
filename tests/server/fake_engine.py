"""A scripted stand-in for `AsyncLLM`: what the server asks of an engine, without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo._core import Tokenizer
from octavo.config import EngineConfig
from octavo.engine.request import PLAIN, Terms
from octavo.errors import RequestError
from octavo.multimodal.placed import NO_MEDIA, PlacedMedia
from octavo.protocol import ModelFacts
from octavo.sampling_params import SamplingParams


@dataclass
class FakeDelta:
    """Like `_core.Delta`."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, list[tuple[int, float]]]] | None = None
    prompt_logprobs: list[tuple[int, list[tuple[int, float]]]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    queue_s: float | None = None
    must_abort: bool = False
    request_id: int = 0


@dataclass
class FakeStats:
    """Like `_core.EngineStats`."""

    num_steps: int = 7
    num_running: int = 2
    num_waiting: int = 3
    num_blocks: int = 100
    num_free_blocks: int = 75
    num_preemptions: int = 4
    num_prompt_tokens: int = 50
    num_output_tokens: int = 60
    prefix_queried_tokens: int = 40
    prefix_hit_tokens: int = 16
    num_finished: int = 5
    num_aborted: int = 1
    num_refused: int = 6
    num_drafts: int = 8
    num_draft_tokens: int = 30
    num_accepted_tokens: int = 20


Item = list[FakeDelta] | Exception | asyncio.Event
"""A batch, an error to raise, or an event to wait for."""


@dataclass
class Submitted:
    """One request as the engine got it."""

    token_ids: list[int]
    params: SamplingParams
    terms: Terms
    first_choice: int = 0


class FakeStream:
    """Yields what the script says."""

    def __init__(self, items: list[Item]) -> None:
        self._items = items
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[list[FakeDelta]]:
        for item in self._items:
            if self.closed:
                return
            if isinstance(item, asyncio.Event):
                await self._wait(item)
            if self._failed.done():
                self._failed.result()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, list):
                yield item

    async def _wait(self, event: asyncio.Event) -> None:
        waiting = asyncio.create_task(event.wait())
        try:
            await asyncio.wait({waiting, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()

    def fail(self, error: Exception) -> None:
        self._failed.set_exception(error)
        self._failed.exception()  # seen, even when it had ended

    def close(self) -> None:
        self.closed = True


def letters(request: Submitted) -> list[Item]:
    """The default script: every sequence gets "a", "b", "c" … one token a batch, until max_tokens."""
    num_tokens = min(request.params.max_tokens or 5, 26)
    n = request.params.n
    batches: list[Item] = []
    for i in range(num_tokens):
        last = i == num_tokens - 1
        batches.append(
            [
                FakeDelta(
                    index=index,
                    text=chr(97 + i),
                    token_ids=[97 + i],
                    finish_reason="length" if last else None,
                    num_cached_tokens=16 if i == 0 else None,
                    queue_s=0.01 if i == 0 else None,
                )
                for index in range(n)
            ]
        )
    return batches


def says(*texts: str, finish: str = "stop", piece: int = 3) -> Callable[[Submitted], list[Item]]:
    """Each choice writes one of these texts, some characters (and as many token ids) a delta."""

    def script(request: Submitted) -> list[Item]:
        items: list[Item] = []
        for index in range(request.params.n):
            text = texts[index % len(texts)]
            pieces = [text[i : i + piece] for i in range(0, len(text), piece)] or [""]
            for i, part in enumerate(pieces):
                ids = [97] * len(part)
                last = finish if i == len(pieces) - 1 else None
                items.append([FakeDelta(index=index, text=part, token_ids=ids, finish_reason=last)])
        return items

    return script


def one_after_another(*scripts: Callable[[Submitted], list[Item]]) -> Callable[[Submitted], list[Item]]:
    rest: Iterator[Callable[[Submitted], list[Item]]] = iter(scripts)
    return lambda request: next(rest)(request)


class FakeLLM:
    """Has the attributes of `AsyncLLM` that the server uses."""

    def __init__(self, tokenizer: Tokenizer | None, folder: str | None, *, max_model_len: int = 128) -> None:
        vocab_size = tokenizer.vocab_size if tokenizer is not None else 300
        self.facts: ModelFacts | None = ModelFacts(
            model="tiny",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            block_size=16,
            num_blocks=100,
            max_num_seqs=8,
            eos_token_ids=(256,),
            dtype="float32",
            device="cpu",
            max_logprobs=20,
            tokenizer_path=folder,
            default_sampling_params={},
        )
        self.tokenizer = tokenizer
        self.images = None
        self.state = "ready"
        self.progress = ("weights", 0.5)
        self.stats: FakeStats | None = FakeStats()
        self.script: Callable[[Submitted], list[Item]] = letters
        self.submitted: list[Submitted] = []
        self.streams: list[FakeStream] = []
        self.num_pings = 0
        self.num_restarts = 0
        self.answers = True
        self.refuses = ""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.engine_pid = 1
        self.num_requests = 0
        self.config = EngineConfig()

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        terms: Terms = PLAIN,
        first_choice: int = 0,
        media: PlacedMedia = NO_MEDIA,
    ) -> FakeStream:
        assert self.facts is not None
        if len(prompt_token_ids) >= self.facts.max_model_len:
            raise RequestError("the prompt is too long", "prompt", "context_length_exceeded")
        if any(not 0 <= i < self.facts.vocab_size for i in prompt_token_ids):
            raise RequestError("the prompt has a token id outside the vocabulary", "prompt")
        params.check_vocabulary(self.facts.vocab_size)
        request = Submitted(list(prompt_token_ids), params, terms, first_choice)
        self.submitted.append(request)
        stream = FakeStream(self.script(request))
        self.streams.append(stream)
        return stream

    async def call(self, name: str, **args: Any) -> dict[str, Any]:
        if not self.answers:
            await asyncio.Event().wait()
        if name == "stats":
            return asdict(FakeStats())
        if name == "ping":
            self.num_pings += 1
            return {}
        self.calls.append((name, args))
        if self.refuses:
            raise ValueError(self.refuses)
        return {"complete": True}
