"""Bodies of POST /v1/messages and /v1/messages/count_tokens, turned into a `TurnRequest`.

Not here: the conversation's blocks (anthropic/conversation.py), answers (anthropic/answer.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.anthropic.conversation import to_chat
from octavo.server.events import ToolName, TurnRequest
from octavo.server.schema.response_format import beside
from octavo.server.schema.sampling import FIELDS, check_terms, sampling_params
from octavo.server.schema.unknown import parse_body
from octavo.server.schema.words import renamed
from octavo.structured_outputs import StructuredOutputs

MAX_TOOLS = 1024
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# Anthropic's effort -> the effort of templates.
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
# Fields that change what is done and are not done here.
REFUSED = {
    "mcp_servers": "is not supported: a request's addresses are never contacted",
    "container": "is not supported: this server runs no code",
    "stop": "is called stop_sequences here",
    "n": "is not part of this API: send several requests",
    "logprobs": "is not part of this API: see /v1/chat/completions",
    "prompt_logprobs": "is not part of this API: see /v1/chat/completions",
}
# The engine's names of fields -> this endpoint's.
WORDS = {"prompt": "messages", "stop": "stop_sequences"}
FORMAT_WORDS = {"structured_outputs": "output_config.format", "structured_outputs.json": "output_config.format.schema"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """`thinking`: whether the model reasons first, for how long, and whether the text is shown."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """A JSON schema that the answer's text must follow."""

    type: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """`output_config`."""

    effort: str | None = None
    format: OutputFormat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """`tool_choice`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRequest:
    """What decides on the prompt."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest(CountRequest):
    """Fields of a call; sampling fields are those of the other endpoints."""

    max_tokens: int
    structured_outputs: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    priority: int = 0
    cache_salt: str | None = None

    @property
    def words(self) -> dict[str, str]:
        """The engine's names of fields -> this endpoint's, as the body has them."""
        return WORDS if self.structured_outputs is not None else {**WORDS, **FORMAT_WORDS}

    @property
    def shows_thinking(self) -> bool:
        """False leaves the text of thinking blocks empty."""
        return self.thinking is None or self.thinking.display != "omitted"


def parse_messages(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[MessagesRequest, TurnRequest]:
    """Check a body. `RequestError` names the field at fault."""
    for name, message in REFUSED.items():
        if body.get(name) not in (None, [], {}):
            raise RequestError(f"{name} {message}", param=name, code="unsupported")
    wanted = parse_body(MessagesRequest, body, (*FIELDS, *REFUSED))
    check_terms(wanted.priority, wanted.cache_salt)
    thinking = wanted.thinking
    if thinking is not None and thinking.budget_tokens is not None and thinking.budget_tokens >= wanted.max_tokens:
        raise RequestError("thinking.budget_tokens must be less than max_tokens", param="thinking.budget_tokens")
    with renamed(wanted.words):
        own = {
            "max_tokens": wanted.max_tokens,
            "stop": wanted.stop_sequences or (),
            "structured_outputs": beside(body, _format(wanted.output_config), "output_config.format"),
        }
        params = sampling_params(body, defaults, **own)
    if body.get("temperature") is not None and params.temperature > 1:
        raise RequestError("temperature must be in [0, 1] in this API", param="temperature")
    return wanted, _turn(wanted, params, priority=wanted.priority, cache_salt=wanted.cache_salt)


def parse_count(body: Mapping[str, Any]) -> tuple[CountRequest, TurnRequest]:
    """The same for a call that only counts the prompt's tokens."""
    wanted = parse_body(CountRequest, body)
    return wanted, _turn(wanted, SamplingParams())


def _turn(wanted: CountRequest, params: SamplingParams, **own: Any) -> TurnRequest:
    if not wanted.messages:
        raise RequestError("messages: at least one message is required", param="messages")
    tools = _tools(wanted.tools or [])
    choice = wanted.tool_choice or ToolChoice(type="auto")
    effort, budget = _thinking(wanted)
    messages = to_chat(wanted.system, wanted.messages)
    return TurnRequest(
        messages=messages,
        params=params,
        tools=tools,
        tool_choice=_tool_choice(choice, tools),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        reasoning_effort=effort,
        thinking_budget=budget,
        include_reasoning=effort != "none",
        template_options=_prefill(messages),
        fit_context=True,
        **own,
    )


def _prefill(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Template options: the answer goes on from a last message by the assistant."""
    if not messages or messages[-1]["role"] != "assistant":
        return {}
    if not messages[-1]["content"]:
        raise RequestError("messages: a last message by the assistant must have text to go on from", param="messages")
    return {"continue_final_message": True, "add_generation_prompt": False}


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools in the OpenAI form."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: at most {MAX_TOOLS} tools", param="tools")
    out = []
    names = set()
    for i, tool in enumerate(tools):
        where = f"tools.{i}"
        kind = tool.get("type")
        if kind not in (None, "custom"):
            message = f"{where}.type: {str(kind)[:60]!r} is not available here; define a custom tool with input_schema"
            raise RequestError(message, param=f"{where}.type", code="unsupported")
        name = tool.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise RequestError(f"{where}.name must be 1 to 128 of A-Z a-z 0-9 _ . -", param=f"{where}.name")
        if name in names:
            raise RequestError(f"{where}.name: tool names must be unique, {name!r} comes twice", param=f"{where}.name")
        names.add(name)
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise RequestError(f"{where}.input_schema must be a JSON schema object", param=f"{where}.input_schema")
        description = tool.get("description")
        if description is not None and not isinstance(description, str):
            raise RequestError(f"{where}.description must be a string", param=f"{where}.description")
        function: dict[str, Any] = {"name": name, "description": description or "", "parameters": schema}
        if tool.get("strict") is True:
            function["strict"] = True
        out.append({"type": "function", "function": function})
    return out


def _tool_choice(choice: ToolChoice, tools: list[dict[str, Any]]) -> str | ToolName:
    if choice.type in ("auto", "none"):
        return choice.type
    if choice.type not in ("any", "tool"):
        raise RequestError("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    if not tools:
        raise RequestError(f"tool_choice {choice.type!r} needs tools", param="tool_choice")
    if choice.type == "any":
        return "required"
    if choice.name not in {tool["function"]["name"] for tool in tools}:
        raise RequestError(f"tool_choice.name: {str(choice.name)[:80]!r} is no tool", param="tool_choice.name")
    assert choice.name is not None
    return ToolName(choice.name)


def _thinking(wanted: CountRequest) -> tuple[str, int | None]:
    """(reasoning effort, budget). Who does not ask for thinking gets none, as in Anthropic's API."""
    thinking, config = wanted.thinking, wanted.output_config
    effort = config.effort if config is not None else None
    if effort is not None and effort not in EFFORTS:
        raise RequestError(f"output_config.effort must be one of {', '.join(EFFORTS)}", param="output_config.effort")
    if thinking is None or thinking.type == "disabled":
        return "none", None
    if thinking.type not in ("enabled", "adaptive"):
        raise RequestError("thinking.type must be enabled, adaptive or disabled", param="thinking.type")
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise RequestError("thinking.budget_tokens is required", param="thinking.budget_tokens")
    if thinking.budget_tokens is not None and not 1 <= thinking.budget_tokens < 2**31:
        raise RequestError("thinking.budget_tokens must be at least 1", param="thinking.budget_tokens")
    if thinking.display not in (None, "summarized", "omitted"):
        raise RequestError("thinking.display must be summarized or omitted", param="thinking.display")
    return EFFORTS[effort or "medium"], thinking.budget_tokens


def _format(config: OutputConfig | None) -> StructuredOutputs | None:
    """The constraint of `output_config.format`."""
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema":
        raise RequestError("output_config.format.type must be json_schema", param="output_config.format.type")
    return StructuredOutputs(json=config.format.schema)
