"""From a turn's request to its prompt: which tools are offered, what the model is told of them, and the token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.multimodal.placed import PlacedMedia
from octavo.server.dialect import Dialect, effort_options
from octavo.server.events import ToolName, TurnRequest
from octavo.server.images import extract
from octavo.server.tools.generic_json import instructions

if TYPE_CHECKING:
    from octavo.server.context import ServerContext

MAX_TOOLS = 512
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_NAME = re.compile(r"[\w.-]{1,128}")


def check_turn(request: TurnRequest, dialect: Dialect) -> None:
    """Raise `RequestError` for tools that are malformed or can't be called, and for an effort that there is not."""
    if request.reasoning_effort not in (None, *EFFORTS):
        raise RequestError(f"reasoning_effort must be one of {', '.join(EFFORTS)}", param="reasoning_effort")
    if request.thinking_budget is not None and request.thinking_budget < 0:
        raise RequestError("thinking_token_budget must be at least 0", param="thinking_token_budget")
    if len(request.tools) > MAX_TOOLS:
        raise RequestError(f"tools may hold at most {MAX_TOOLS} tools, got {len(request.tools)}", param="tools")
    names: set[str] = set()
    for i, tool in enumerate(request.tools):
        name = _check_tool(tool, f"tools[{i}]")
        if name in names:
            raise RequestError(f"tools[{i}]: there are two functions named {name!r}", param="tools")
        names.add(name)
    if isinstance(request.tool_choice, ToolName):
        if request.tool_choice.name not in names:
            raise RequestError(f"tool_choice names {request.tool_choice.name[:80]!r}, not one of tools", "tool_choice")
    elif request.tool_choice not in ("auto", "none", "required"):
        raise RequestError("tool_choice must be none, auto, required, or name a function", param="tool_choice")
    elif request.tool_choice == "required" and not names:
        raise RequestError("tool_choice is required, but there are no tools", param="tool_choice")
    if names and dialect.tools is None and request.tool_choice != "none":
        raise RequestError(
            "this server does not parse calls of tools: start it with --tool-call-parser auto", param="tools"
        )


def _check_tool(tool: object, where: str) -> str:
    """A function tool's name."""
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise RequestError(f'{where} must be an object of type "function"', param=where)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function must be an object", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must be 1 to 128 letters, digits, '_', '-' or '.'", param=f"{where}.function.name"
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.function.parameters must be a JSON Schema object", f"{where}.function.parameters")
    kind = (parameters or {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(
            f'{where}.function.parameters must describe an object ("type": "object"), as arguments are one',
            f"{where}.function.parameters",
        )
    return name


def offered_tools(request: TurnRequest) -> Sequence[Mapping[str, Any]]:
    """The tools that the model is told of: none when it must not call any."""
    return () if request.tool_choice == "none" else request.tools


async def encode_prompt(
    context: ServerContext, request: TurnRequest, *, size_bytes: int
) -> tuple[list[int], PlacedMedia]:
    """The prompt that a turn submits, and its images. `RequestError` as `encode_turn`, or of an image."""
    images = await extract(context, request.messages, size_bytes=size_bytes)
    if images.images:
        options = {**request.template_options, **images.options}
        request = replace(request, messages=images.messages, template_options=options)
    has_template = "chat_template" in request.template_options
    token_ids = await context.run_text(encode_turn, context, request, size_bytes=size_bytes, is_slow=has_template)
    return images.place(token_ids)


def encode_turn(context: ServerContext, request: TurnRequest) -> list[int]:
    """Token ids of the prompt. `RequestError` when the request is malformed or does not fit the model."""
    dialect = context.dialect
    check_turn(request, dialect)
    tools = [_told(tool["function"]) for tool in offered_tools(request)]
    messages = request.messages
    if tools and not dialect.shows_tools:
        messages = _with_instructions(messages, instructions(tools, dialect.shape))
    options = {**effort_options(request.reasoning_effort), **request.template_options}
    encoder = context.encoder_of(options.pop("chat_template", None))
    return encoder.encode_chat(messages, tools=tools or None, **options)


def _told(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool as templates are told of it: with the fields that they look for, without what only the server reads."""
    told = {name: value for name, value in function.items() if name != "strict" and value is not None}
    told.setdefault("description", "")
    told.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": told}


def _with_instructions(messages: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """The messages with a text at the beginning of the system message."""
    first = messages[0] if messages else {}
    if not isinstance(first, Mapping) or first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    content = first.get("content")
    if isinstance(content, list):
        return [{**first, "content": [{"type": "text", "text": text}, *content]}, *messages[1:]]
    return [{**first, "content": f"{text}\n\n{content}"}, *messages[1:]]
