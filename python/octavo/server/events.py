"""An assistant's turn as data: what a caller asks for, and the events that every API shape is written from.

Chat completions, Responses and Messages all parse their bodies into a `TurnRequest` and write `TurnEvent`s in their
own words. Not here: how text becomes events (turn.py with tools/ and reasoning/), HTTP bodies (schema/), answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.sampling_params import SamplingParams
from octavo.server.logprobs import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """What one call asks the model to say.

    Attributes:
        messages: The conversation in the OpenAI chat form, which chat templates take. A past turn's reasoning is
            `reasoning_content` of an assistant message, its tool calls are `tool_calls`, results are `role: "tool"`.
        params: How tokens are chosen; `structured_outputs` constrains the answer (after the reasoning).
        tools: OpenAI function tools: {"type": "function", "function": {name, description, parameters, strict}}.
        tool_choice: "auto", "none", "required", or the name of the one tool that must be called as `ToolName`.
        parallel_tool_calls: The turn may hold more than one call.
        reasoning_effort: "none", "minimal", "low", "medium", "high" or "xhigh"; None leaves it to the template.
        thinking_budget: Most tokens of reasoning; None sets no bound of its own.
        include_reasoning: Report reasoning; else it is generated and left out.
        fit_context: Cut `params.max_tokens` to what the prompt leaves of the context, instead of refusing it.
        template_options: Further names that the chat template sees, and keywords of `PromptEncoder.encode_chat`.
        return_token_ids: Content deltas carry the generated ids.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | ToolName = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    include_reasoning: bool = True
    fit_context: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class ToolName:
    """A `tool_choice` that names a function."""

    name: str


@dataclass(slots=True)
class ReasoningDelta:
    """More of the reasoning of a choice; never empty."""

    choice: int
    text: str


@dataclass(slots=True)
class ContentDelta:
    """More of the answer's text; never empty unless it carries logprobs or ids.

    `rows` and `token_ids` are set when the request asked for them. They cover every generated token in order, those of
    reasoning and calls too, whose text comes in other events.
    """

    choice: int
    text: str
    rows: Sequence[Row] | None = None
    token_ids: Sequence[int] = ()


@dataclass(slots=True)
class ToolCallStart:
    """A call begins; `call` counts from 0 in its choice."""

    choice: int
    call: int
    id: str
    name: str


@dataclass(slots=True)
class ToolCallDelta:
    """More of a call's arguments: the pieces of a call joined are one JSON object."""

    choice: int
    call: int
    arguments: str


@dataclass(slots=True)
class TurnEnd:
    """A choice has ended: "stop", "length", "tool_calls" or "abort"; `stop_reason` is the stop string or id."""

    choice: int
    finish_reason: str
    stop_reason: int | str | None = None


TurnEvent = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallDelta | TurnEnd


@dataclass(slots=True)
class ToolCall:
    """A whole call."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class TurnMessage:
    """A choice in one piece, as its events joined."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    rows: list[Row] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
