"""Body of POST /v1/responses.

Not here: items (responses/items.py), tools (responses/tools.py), answers (responses/answer.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.chat_template import check_template_kwargs
from octavo.errors import RequestError
from octavo.sampling_params import MAX_LOGPROBS, SamplingParams
from octavo.server.schema.response_format import beside
from octavo.server.schema.sampling import FIELDS, check_terms, sampling_params
from octavo.server.schema.unknown import parse_body
from octavo.server.schema.words import renamed
from octavo.structured_outputs import StructuredOutputs

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
# What `include` may name; those of tools that are not here add nothing.
INCLUDES = (
    LOGPROBS,
    SEALED_REASONING,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
# OpenAI's effort -> the effort of templates.
EFFORTS = {
    **{name: name for name in ("none", "minimal", "low", "medium", "high")},
    "xhigh": "high",
    "max": "high",
}
# Fields that change the answer and are not done here -> what to say.
REFUSED = {
    "conversation": "is not supported: use previous_response_id",
    "prompt": "is not supported: this server keeps no prompt templates",
    "context_management": "is not supported",
    "moderation": "is not supported",
    "response_format": "is called text.format in this API",
    "max_tokens": "is called max_output_tokens in this API",
    "messages": "is called input in this API",
    "prompt_logprobs": "is not part of this API: see /v1/chat/completions",
}
# The engine's names of fields -> this endpoint's.
WORDS = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
FORMAT_WORDS = {"structured_outputs": "text.format", "structured_outputs.json": "text.format.schema"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """`reasoning`; summaries are not written, the reasoning itself is shown."""

    effort: str | None = None
    summary: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """`text.format`."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """`text`."""

    format: Format | None = None
    verbosity: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """Fields beside sampling."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None
    text: Text | None = None
    structured_outputs: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool = True
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool = False
    include: list[str] | None = None
    truncation: str = "disabled"
    stream: bool = False
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int = 0
    cache_salt: str | None = None

    @property
    def effort(self) -> str | None:
        """Reasoning effort for the template; None leaves it to the template."""
        return EFFORTS[self.reasoning.effort] if self.reasoning is not None and self.reasoning.effort else None

    @property
    def words(self) -> dict[str, str]:
        """The engine's names of fields -> this endpoint's, as the body has them."""
        return WORDS if self.structured_outputs is not None else {**WORDS, **FORMAT_WORDS}

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def seals_reasoning(self) -> bool:
        return SEALED_REASONING in (self.include or ())


def parse_responses(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[ResponsesRequest, SamplingParams]:
    """Check a body. `RequestError` names the field at fault."""
    for name, message in REFUSED.items():
        if body.get(name) not in (None, [], {}):
            raise RequestError(f"{name} {message}", param=name, code="unsupported")
    wanted = parse_body(ResponsesRequest, body, (*FIELDS, *REFUSED))
    _check(wanted)
    own: dict[str, Any] = {"max_tokens": wanted.max_output_tokens}
    if wanted.wants_logprobs or wanted.top_logprobs is not None:
        own["logprobs"] = wanted.top_logprobs or 0
    with renamed(wanted.words):
        own["structured_outputs"] = beside(body, _format(wanted.text), "text.format")
        params = sampling_params(body, defaults, **own)
    if params.n != 1:
        raise RequestError("n is not part of this API: send several requests", param="n", code="unsupported")
    return wanted, params


def _check(wanted: ResponsesRequest) -> None:
    if not wanted.input:
        raise RequestError("input must not be empty", param="input")
    for name in wanted.include or ():
        if name not in INCLUDES:
            raise RequestError(f"include can't name {name!r}; it takes {', '.join(INCLUDES)}", param="include")
    if wanted.truncation not in ("auto", "disabled"):
        raise RequestError("truncation must be auto or disabled", param="truncation")
    if wanted.reasoning is not None and wanted.reasoning.effort and wanted.reasoning.effort not in EFFORTS:
        raise RequestError(f"reasoning.effort must be one of {', '.join(EFFORTS)}", param="reasoning.effort")
    if wanted.top_logprobs is not None and not 0 <= wanted.top_logprobs <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must be between 0 and {MAX_LOGPROBS}", param="top_logprobs")
    if wanted.max_tool_calls is not None and wanted.max_tool_calls < 1:
        raise RequestError("max_tool_calls must be at least 1", param="max_tool_calls")
    if wanted.background and wanted.store is False:
        raise RequestError("background needs store: the response is fetched later", param="background")
    check_terms(wanted.priority, wanted.cache_salt)
    check_metadata(wanted.metadata or {})
    check_template_kwargs(wanted.chat_template_kwargs or {})


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """OpenAI's limits: 16 pairs of strings, 64 and 512 characters."""
    fits = len(metadata) <= 16 and all(
        isinstance(value, str) and len(key) <= 64 and len(value) <= 512 for key, value in metadata.items()
    )
    if not fits:
        raise RequestError(
            "metadata must hold at most 16 strings of 512 characters, under names of 64", param="metadata"
        )


def _format(text: Text | None) -> StructuredOutputs | None:
    """The constraint of `text.format`."""
    wanted = text.format if text is not None else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputs(json_object=True)
    if wanted.type != "json_schema":
        raise RequestError("text.format.type must be text, json_object or json_schema", param="text.format.type")
    if wanted.schema is None:
        raise RequestError("text.format.schema is required", param="text.format.schema")
    return StructuredOutputs(json=wanted.schema)
