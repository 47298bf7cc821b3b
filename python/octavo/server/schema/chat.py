"""Body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.chat_template import check_template_kwargs
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.events import ToolName, TurnRequest
from octavo.server.schema.refused import REFUSED, refuse_unsupported
from octavo.server.schema.response_format import constraint
from octavo.server.schema.sampling import FIELDS, CommonRequest, sampling_params
from octavo.server.schema.unknown import parse_body
from octavo.server.schema.words import renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(CommonRequest):
    """Fields beside sampling; see README.md beside `schema/` for their meaning."""

    messages: list[Any]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    thinking_token_budget: int | None = None

    @property
    def words(self) -> dict[str, str]:
        """The engine's names of fields -> this endpoint's, as the body has them."""
        names = {"logprobs": "top_logprobs", "prompt": "messages", **self.constraint_words}
        return names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}

    @property
    def template_options(self) -> dict[str, Any]:
        """Keywords of `PromptEncoder.encode_chat`."""
        opens_turn = self.add_generation_prompt
        return {
            "add_special_tokens": self.add_special_tokens,
            "add_generation_prompt": not self.continue_final_message if opens_turn is None else opens_turn,
            "continue_final_message": self.continue_final_message,
            **({"documents": self.documents} if self.documents else {}),
            **({"chat_template": self.chat_template} if self.chat_template is not None else {}),
            **(self.chat_template_kwargs or {}),
        }


def parse_chat(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[ChatRequest, TurnRequest]:
    """Check a body. `RequestError` names the field at fault."""
    refuse_unsupported(body)
    request = parse_body(ChatRequest, body, (*FIELDS, *REFUSED))
    request.check(body)
    if not request.messages:
        raise RequestError("messages must not be empty", param="messages")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    check_template_kwargs(request.chat_template_kwargs or {})
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ: give one", param="max_tokens")
    with renamed(request.words):
        params = sampling_params(
            body,
            defaults,
            max_tokens=limits.pop() if limits else None,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            structured_outputs=constraint(body),
        )
    return request, turn_request(request, params)


def turn_request(request: ChatRequest, params: SamplingParams) -> TurnRequest:
    """What a body asks of a turn. `RequestError` for a tool choice that is none."""
    tools, choice = choose_tools(request.tools or [], request.tool_choice)
    return TurnRequest(
        messages=request.messages,
        params=params,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=request.reasoning_effort,
        thinking_budget=request.thinking_token_budget,
        include_reasoning=request.include_reasoning,
        template_options=request.template_options,
        return_token_ids=request.return_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def choose_tools(
    tools: list[dict[str, Any]], choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]], str | ToolName]:
    """The tools that may be called, and how, in the forms of `tool_choice`: none, auto, required, a function, or
    allowed_tools. Without tools "auto" means none."""
    if choice is None or isinstance(choice, str):
        return tools, choice or "auto"
    kind = choice.get("type")
    body = choice.get(str(kind))
    if kind == "function" and isinstance(body, dict) and isinstance(body.get("name"), str):
        return tools, ToolName(body["name"])
    if kind == "allowed_tools" and isinstance(body, dict) and isinstance(body.get("tools"), list):
        names = {_function_name(tool) for tool in body["tools"]}
        allowed = [tool for tool in tools if _function_name(tool) in names]
        if len(allowed) < len(names):
            raise RequestError("tool_choice.allowed_tools names a function that is not in tools", param="tool_choice")
        return allowed, str(body.get("mode", "auto"))
    raise RequestError(
        'tool_choice must be none, auto, required, or {"type": "function", "function": {"name": …}}',
        param="tool_choice",
    )


def _function_name(tool: object) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
