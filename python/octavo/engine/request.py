"""From what a caller wants to what the engine takes: validation against the model, and every default resolved.

Both `LLM` and `AsyncLLM` prepare requests here, before anything is sent; the engine trusts what it gets. Not here:
tokenization of prompts (prompts.py) and the range of sampling parameters (sampling_params.py).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo._core import OutputProcessor, Tokenizer, encode_add
from octavo.errors import RequestError
from octavo.multimodal.placed import NO_MEDIA, PlacedMedia
from octavo.protocol import ModelFacts
from octavo.sampling_params import SamplingParams

MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Terms:
    """How the engine treats a request beside others."""

    priority: int = 0
    """Lower runs first under --scheduling-policy priority."""
    cache_salt: str = ""
    """Requests share cached prefixes only within one salt."""
    deadline_s: float = 0.0
    """After which a request that still waits is refused; 0: none."""
    tenant: int = 0
    """Requests of different tenants take turns, in proportion to their `weight`s; 0: nobody in particular."""
    weight: float = 1.0


PLAIN = Terms()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One valid request, fully resolved; it has no number yet."""

    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: list[int]
    """Ids that end a sequence; the model's EOS ids are among them unless the request ignores EOS."""
    wire: bytes
    """What the worker reads: JSON of the parameters and the resolved seed, EOS ids and bad-word ids."""
    terms: Terms
    media: PlacedMedia
    """The prompt's images."""

    def encode(self, request_id: int) -> bytes:
        """The frame that adds this request."""
        params, terms = self.params, self.terms
        return encode_add(
            request_id=request_id,
            prompt_token_ids=self.prompt_token_ids,
            n=params.n,
            max_tokens=self.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=self.stop_token_ids,
            priority=terms.priority,
            cache_salt=terms.cache_salt.encode(),
            deadline_s=terms.deadline_s,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            params=self.wire,
            tenant=terms.tenant,
            weight=max(1, round(1000 * terms.weight)),
            grammar=params.grammar,
            media=self.media.spans,
            media_data=self.media.data,
        )

    def register(self, processor: OutputProcessor, request_id: int) -> None:
        """Tell the output processor how this request's tokens become text."""
        params = self.params
        processor.add(
            request_id,
            n=params.n,
            prompt_token_ids=self.prompt_token_ids,
            stop=list(params.stop),
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            detokenize=params.detokenize,
            min_tokens=params.min_tokens,
        )


def recommended_params(facts: ModelFacts) -> SamplingParams:
    """What the checkpoint's authors recommend, for requests that bring no parameters."""
    values: dict[str, Any] = dict(facts.default_sampling_params)
    if "top_k" in values:
        values["top_k"] = int(values["top_k"])
    return SamplingParams(**values)


class RequestFactory:
    """Prepares requests for one model.

    `seed` starts the generator from which requests without a seed of their own get theirs.
    """

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer | None, seed: int) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self._random = random.Random(seed)

    def prepare(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        terms: Terms = PLAIN,
        first_choice: int = 0,
        media: PlacedMedia = NO_MEDIA,
    ) -> EngineRequest:
        """Check a request against the model and resolve its defaults. RequestError names the field at fault.

        Args:
            first_choice: Its sequences draw as those from this one on of a larger `n` would.
        """
        if self.facts.task != "generate":
            raise RequestError(f"this model does not generate text (its task is {self.facts.task})", "model")
        prompt = self._check_prompt(prompt_token_ids)
        self._check_params(params)
        if not -MAX_PRIORITY <= terms.priority <= MAX_PRIORITY:
            raise RequestError(f"priority must be within ±{MAX_PRIORITY}, got {terms.priority}", "priority")
        eos = [] if params.ignore_eos else list(self.facts.eos_token_ids)
        stop_token_ids = list(dict.fromkeys([*eos, *params.stop_token_ids]))
        wire = params.to_wire(
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            bad_words_ids=self._bad_words_ids(params.bad_words),
            eos_token_ids=eos,
            stop_token_ids=stop_token_ids,
            **({"first_choice": first_choice} if first_choice else {}),
        )
        max_tokens = self._max_tokens(len(prompt), params)
        return EngineRequest(prompt, params, max_tokens, stop_token_ids, wire, terms, media)

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt as a list of ids that the model knows, with room for one token more."""
        given = list(prompt_token_ids)
        if not given:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        try:
            prompt = array("q", given).tolist()  # integers of NumPy become Python's
        except (TypeError, OverflowError):
            raise RequestError("the prompt must be text or a list of integer token ids", "prompt") from None
        vocab_size = self.facts.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            at = next(i for i, token_id in enumerate(prompt) if not 0 <= token_id < vocab_size)
            raise RequestError(
                f"the prompt has token id {prompt[at]} at position {at}; the vocabulary is 0 to {vocab_size - 1}",
                "prompt",
            )
        limit = self.facts.max_model_len
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; the context length is {limit}, output included: shorten the "
                f"prompt by {len(prompt) - limit + 1} tokens or more",
                "prompt",
                "context_length_exceeded",
            )
        return prompt

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """The request's own limit, or the rest of the context."""
        limit = self.facts.max_model_len
        room = limit - num_prompt_tokens
        if params.max_tokens is not None and params.max_tokens > room:
            raise RequestError(
                f"max_tokens is {params.max_tokens} and the prompt has {num_prompt_tokens} tokens: together "
                f"{params.max_tokens - room} more than the context length of {limit}; max_tokens may be {room} here",
                "max_tokens",
                "context_length_exceeded",
            )
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but the context of {limit} tokens leaves {room}", "min_tokens"
            )
        return room if params.max_tokens is None else params.max_tokens

    def _check_params(self, params: SamplingParams) -> None:
        """What depends on the model: its vocabulary, its tokenizer, how many logprobs its engine returns."""
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams(…), not {type(params).__name__}", "sampling_params"
            )
        params.check_vocabulary(self.facts.vocab_size)
        for param in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, param)
            if wanted is not None and wanted > self.facts.max_logprobs:
                raise RequestError(f"{param} may be at most {self.facts.max_logprobs} here, got {wanted}", param)
        if params.stop and not params.detokenize:
            raise RequestError("stop strings are matched in text: they need detokenize", "stop")
        for param in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, param) and self.tokenizer is None:
                raise RequestError(f"{param} needs a tokenizer, and this model has none", param)

    def _bad_words_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of each word, at the start of a text and after a blank."""
        if not words:
            return []
        assert self.tokenizer is not None, "_check_params refuses bad words without a tokenizer"
        spellings = [spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip())]
        encoded = self.tokenizer.encode_batch(spellings, add_special_tokens=False)
        return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in encoded if ids)]
