"""Tools of a Responses request: the functions that the model may call, in the form that turns take.

Not here: calls of MCP servers (mcp.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import RequestError
from octavo.server.events import ToolName
from octavo.server.schema.unknown import note_once

MAX_TOOLS = 1024
HOSTED = (
    "web_search",
    "web_search_preview",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer",
    "computer_use_preview",
    "local_shell",
    "shell",
    "apply_patch",
    "tool_search",
    "namespace",
)
"""Types of tools that are not here, without the dates that may follow. Agents such as Codex send them with every
request and do well without: the model is not told of them, and the answer does not list them."""
FREE_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a custom tool as the model sees it: its input is free text."""
_DATE = re.compile(r"(_\d{4}_\d\d_\d\d|_\d{8})\Z")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(slots=True)
class Toolbox:
    """What the model may call.

    Attributes:
        functions: In the chat form, {"type": "function", "function": {…}}.
        custom: Names of those that are custom tools.
        choice: What the model must call, as in `TurnRequest`.
        echo: The tools as the response object shows them.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    custom: set[str] = field(default_factory=set)
    choice: str | ToolName = "auto"
    echo: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, description: str, parameters: object, strict: bool, where: str) -> None:
        """One more function. `RequestError` for a bad or second use of a name, and parameters that are no schema."""
        if not _NAME.fullmatch(name):
            raise RequestError(f"{where}.name must be 1 to 128 of A-Z a-z 0-9 _ . -", param="tools")
        if len(self.functions) >= MAX_TOOLS:
            raise RequestError(f"at most {MAX_TOOLS} tools", param="tools")
        if name in self.names:
            raise RequestError(f"{where}: the tool name {name!r} comes twice", param="tools")
        if not isinstance(parameters, dict):
            raise RequestError(f"{where}.parameters must be a JSON schema object", param="tools")
        function: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
        if strict:
            function["strict"] = True
        self.functions.append({"type": "function", "function": function})

    @property
    def names(self) -> set[str]:
        return {tool["function"]["name"] for tool in self.functions}

    def keep(self, names: set[str]) -> None:
        """Leave the other functions out."""
        self.functions = [tool for tool in self.functions if tool["function"]["name"] in names]


def add_functions(box: Toolbox, tools: Sequence[Mapping[str, Any]]) -> None:
    """The request's own functions and custom tools. `RequestError` for tools of types that nobody knows."""
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        kind = tool.get("type")
        if kind == "mcp":
            box.echo.append(dict(tool))
        elif kind in ("function", "custom"):
            _add_own(box, tool, where)
        elif isinstance(kind, str) and _DATE.sub("", kind) in HOSTED:
            note_once(f"tools of type {kind!r}")
        else:
            message = f"{where}.type: {str(kind)[:60]!r} tools are not available here; known: function, custom, mcp"
            raise RequestError(message, param="tools", code="unsupported")


def _add_own(box: Toolbox, tool: Mapping[str, Any], where: str) -> None:
    """A tool that the client runs."""
    name, description = tool.get("name"), tool.get("description")
    if not isinstance(name, str) or not isinstance(description, str | None):
        raise RequestError(f"{where}: name and description must be strings", param="tools")
    if tool["type"] == "custom":
        box.add(name, _with_syntax(description or "", tool.get("format"), where), FREE_INPUT, False, where)
        box.custom.add(name)
        box.echo.append(dict(tool))
        return
    parameters = tool.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    strict = tool.get("strict") is True
    box.add(name, description or "", parameters, strict, where)
    box.echo.append({**tool, "parameters": parameters, "strict": strict})


def free_input(arguments: str) -> str:
    """The text that a call of a custom tool is for. A call that was cut, or not made as asked, is its own text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _with_syntax(description: str, form: object, where: str) -> str:
    """What a custom tool takes: its grammar is told to the model, not enforced."""
    if form is None or (isinstance(form, Mapping) and form.get("type") == "text"):
        return description
    definition = form.get("definition") if isinstance(form, Mapping) and form.get("type") == "grammar" else None
    if not isinstance(definition, str):
        raise RequestError(f"{where}.format must be text, or a grammar with a definition", param="tools")
    return f"{description}\n\nThe input follows this grammar:\n{definition}".lstrip()


NamesOf = Callable[[object, object], list[str]]
"""(server label, tool's name or None for all) -> the names that the model knows the server's tools by."""


def choose(box: Toolbox, choice: str | Mapping[str, Any] | None, served: NamesOf) -> None:
    """Set what must be called, once all tools are known. `RequestError` for a choice that no tool fits."""
    if choice is None:
        return
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise RequestError("tool_choice must be auto, none, required or an object", param="tool_choice")
        if choice == "required" and not box.functions:
            raise RequestError("tool_choice 'required' needs tools", param="tool_choice")
        box.choice = choice
        return
    kind = choice.get("type")
    if kind in ("function", "custom"):
        box.choice = ToolName(_names(box, choice, served)[0])
    elif kind == "mcp":
        names = _names(box, choice, served)
        box.choice = ToolName(names[0]) if len(names) == 1 else "required"
        box.keep(set(names))
    elif kind == "allowed_tools":
        _allow(box, choice, served)
    else:
        raise RequestError(f"tool_choice.type: {str(kind)[:60]!r} is not known here", param="tool_choice")


def _names(box: Toolbox, choice: object, served: NamesOf) -> list[str]:
    """The functions that a choice names: one of the request's own, or those of a server."""
    if isinstance(choice, Mapping):
        if choice.get("type") == "mcp":
            names = served(choice.get("server_label"), choice.get("name"))
            if names:
                return names
        name = choice.get("name")
        if isinstance(name, str) and name in box.names:
            return [name]
    raise RequestError("tool_choice names no tool of this request", param="tool_choice")


def _allow(box: Toolbox, choice: Mapping[str, Any], served: NamesOf) -> None:
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise RequestError("tool_choice.mode must be auto or required, and tools a list", param="tool_choice")
    box.keep({name for tool in tools for name in _names(box, tool, served)})
    if mode == "required" and not box.functions:
        raise RequestError("tool_choice.tools must not be empty", param="tool_choice")
    box.choice = mode
