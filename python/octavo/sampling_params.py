"""How a request's tokens are chosen: one frozen dataclass, validated on construction, JSON on the wire.

Field names and meanings are those of vLLM and the OpenAI API. The HTTP schema and the worker's sampler features read
these fields; a new sampler feature adds its field here and its file in sampling/.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from octavo.errors import RequestError
from octavo.structured_outputs import StructuredOutputs

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_LOGIT_BIAS = 1024


def _check(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise RequestError(f"{param} {message}", param=param)


def _number(value: object, param: str) -> float:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _check(ok, param, f"must be a finite number, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def _in_range(value: object, param: str, low: float, high: float, *, open_low: bool = False) -> None:
    number = _number(value, param)
    bracket = "(" if open_low else "["
    ok = (low < number if open_low else low <= number) and number <= high
    _check(ok, param, f"must be in {bracket}{low:g}, {high:g}], got {number:g}")


def _integer(value: object, param: str, low: int, high: int) -> None:
    _check(isinstance(value, int) and not isinstance(value, bool), param, f"must be an integer, got {value!r}")
    _check(low <= value <= high, param, f"must be between {low} and {high}, got {value}")  # type: ignore[operator]


_PLAIN = (int, float, str, bool, type(None))


def _plain(value: Any) -> Any:
    """An int or a float in place of a number that is neither; others as they are, for the checks to name."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request.

    Attributes:
        n: Sequences sampled from the prompt.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the k most probable tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches it (Holtzman et al. 2020, nucleus sampling).
        min_p: Keep tokens at least this fraction as probable as the best (Nguyen et al. 2024).
        presence_penalty: Subtracted once from the logit of every token already generated.
        frequency_penalty: Subtracted per occurrence in the generated text.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output (Keskar et
            al. 2019, section 4.1).
        seed: Same request and seed give the same tokens, whatever else runs.
        stop: Strings that end a sequence; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end a sequence.
        bad_words: Words that are never generated (matched on token ids, with and without a leading blank).
        ignore_eos: Go on past the model's end-of-sequence ids.
        max_tokens: Most tokens to generate; None means up to the context length.
        min_tokens: No end of sequence and no stop id before this many tokens.
        logprobs: Number of top log probabilities per generated token (0: only the chosen token's); None: none.
        prompt_logprobs: The same for prompt tokens. Such requests don't read the prefix cache.
        logit_bias: Token id to a number in [-100, 100] added to its logit.
        allowed_token_ids: Only these ids may be generated.
        structured_outputs: What the output must look like; a mapping is turned into `StructuredOutputs`. Such a
            sequence ends where its grammar is complete and can't go on, and may end wherever it is complete.
        detokenize: Produce text; otherwise only token ids.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Keep the matched stop string in the text.

    Raises:
        RequestError: A value is out of range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._take_numbers()
        self._take_lists()
        _integer(self.n, "n", 1, MAX_N)
        _in_range(self.temperature, "temperature", 0, 100)
        _integer(self.top_k, "top_k", -1, 2**31 - 1)
        _in_range(self.top_p, "top_p", 0, 1, open_low=True)
        _in_range(self.min_p, "min_p", 0, 1)
        _in_range(self.presence_penalty, "presence_penalty", -2, 2)
        _in_range(self.frequency_penalty, "frequency_penalty", -2, 2)
        _in_range(self.repetition_penalty, "repetition_penalty", 0, 100, open_low=True)
        if self.seed is not None:
            _integer(self.seed, "seed", -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer(self.max_tokens, "max_tokens", 1, 2**31 - 1)
        _integer(self.min_tokens, "min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
            )
        for param in ("logprobs", "prompt_logprobs"):
            if getattr(self, param) is not None:
                _integer(getattr(self, param), param, 0, MAX_LOGPROBS)
        for param in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            value = getattr(self, param)
            _check(isinstance(value, bool), param, f"must be True or False, got {value!r}")
        self._check_stop()
        self._check_token_lists()
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputs.from_mapping(self.structured_outputs))
        ok = isinstance(self.structured_outputs, StructuredOutputs | None)
        _check(ok, "structured_outputs", f"must be an object, got {self.structured_outputs!r}")

    @property
    def grammar(self) -> bytes:
        """The constraint as the engine reads it; b"" for none."""
        constraint = self.structured_outputs
        return constraint.to_wire() if isinstance(constraint, StructuredOutputs) else b""

    def _take_numbers(self) -> None:
        """Numbers of NumPy and the like become Python's, which JSON can hold."""
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in _PLAIN:
                object.__setattr__(self, name, _plain(value))

    def _take_lists(self) -> None:
        """One string stands for a list of one; sets and ranges become tuples, which JSON can hold."""
        for param in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids"):
            value = getattr(self, param)
            if isinstance(value, str) and param in ("stop", "bad_words"):
                value = (value,)
            if value is not None or param != "allowed_token_ids":
                is_list = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
                _check(is_list, param, f"must be a list, got {value!r}")
            if value is not None and not all(type(item) in _PLAIN for item in value):
                value = tuple(map(_plain, value))
            if value is not None and not isinstance(value, list):
                object.__setattr__(self, param, tuple(value))
        _check(isinstance(self.logit_bias, Mapping), "logit_bias", f"must be a dict, got {self.logit_bias!r}")
        if not all(type(part) in _PLAIN for pair in self.logit_bias.items() for part in pair):
            plain = {_plain(token_id): _plain(bias) for token_id, bias in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", plain)

    def _check_stop(self) -> None:
        _check(
            len(self.stop) <= MAX_STOP_STRINGS,
            "stop",
            f"may hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}",
        )
        for text in self.stop:
            _check(isinstance(text, str) and text != "", "stop", "must hold non-empty strings")
            _check(len(text) <= MAX_STOP_CHARS, "stop", f"strings may have at most {MAX_STOP_CHARS} characters")
        _check(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"may hold at most {MAX_BAD_WORDS} words")
        for text in self.bad_words:
            _check(isinstance(text, str) and text != "", "bad_words", "must hold non-empty strings")
            _check(
                len(text) <= MAX_BAD_WORD_CHARS, "bad_words", f"may have at most {MAX_BAD_WORD_CHARS} characters each"
            )

    def _check_token_lists(self) -> None:
        for token_id in self.stop_token_ids:
            _integer(token_id, "stop_token_ids", 0, 2**31 - 1)
        _check(len(self.stop_token_ids) <= 1024, "stop_token_ids", "may hold at most 1024 ids")
        if self.allowed_token_ids is not None:
            _check(len(self.allowed_token_ids) > 0, "allowed_token_ids", "must not be empty")
            for token_id in self.allowed_token_ids:
                _integer(token_id, "allowed_token_ids", 0, 2**31 - 1)
        _check(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"may hold at most {MAX_LOGIT_BIAS} entries")
        for token_id, bias in self.logit_bias.items():
            _integer(token_id, "logit_bias", 0, 2**31 - 1)
            _in_range(bias, "logit_bias", -100, 100)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` when a token id named here is not below `vocab_size`, or a list names more than there
        are."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": self.logit_bias,
        }
        for param, ids in named.items():
            _check(len(ids) <= vocab_size, param, f"has {len(ids)} ids; the vocabulary has {vocab_size}")
            for token_id in ids:
                _check(
                    token_id < vocab_size,
                    param,
                    f"has token id {token_id}; the vocabulary ends at {vocab_size - 1}",
                )

    def to_wire(self, **extra: Any) -> bytes:
        """JSON of every field that differs from its default, plus `extra` (resolved values such as bad-word ids). Of a
        constraint only that there is one: the control plane reads it."""
        values = {name: value for name, default in _DEFAULTS.items() if (value := getattr(self, name)) != default}
        if values.pop("structured_outputs", None) is not None:
            values["is_constrained"] = True
        return json.dumps({**values, **extra}, separators=(",", ":")).encode()


_NUMBERS = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
)
_DEFAULTS = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}
