"""Sampling fields of a request body: those of `SamplingParams`, by their own names and types.

A new field of `SamplingParams` is a field of the HTTP API without a change here.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.schema.parse import Check, check_for, pick
from octavo.server.schema.response_format import WORDS

# Fields with another form in the API than in SamplingParams: each endpoint gives them itself.
_OWN_FORM = ("logprobs", "max_tokens", "detokenize", "structured_outputs")

FIELDS: dict[str, Check] = {
    **{name: check_for(hint) for name, hint in typing.get_type_hints(SamplingParams).items() if name not in _OWN_FORM},
    "stop": check_for(str | list[str]),
}


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`stream_options` of a request."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonRequest:
    """What chat and completions share beside sampling."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    echo: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def constraint_words(self) -> Mapping[str, str]:
        """What a constraint on the answer is called in this body, by the engine's names."""
        return {} if self.response_format is None else WORDS

    def check(self, body: Mapping[str, Any]) -> None:
        """Contradictions between fields, as `RequestError`."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.best_of is not None and self.best_of != (body.get("n") or 1):
            raise RequestError("best_of is not supported: it must equal n", param="best_of", code="unsupported")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs can't be streamed: leave stream out", param="prompt_logprobs")
        check_terms(self.priority, self.cache_salt)


def check_terms(priority: int, cache_salt: str | None) -> None:
    """What every body may ask for beside its own API's fields. `RequestError` for a value that can't be."""
    if not -(2**31) <= priority < 2**31:
        raise RequestError("priority must be a 32-bit integer", param="priority")
    if cache_salt is not None and not 1 <= len(cache_salt) <= 1024:
        raise RequestError("cache_salt must have 1 to 1024 characters", param="cache_salt")


def sampling_params(body: Mapping[str, Any], defaults: Mapping[str, Any], **own: Any) -> SamplingParams:
    """Parameters from a body. `defaults` (the checkpoint's recommendations) fill what the request leaves out; `own`
    are the fields with another form in the API."""
    return SamplingParams(**{**defaults, **pick(FIELDS, body), **own})
