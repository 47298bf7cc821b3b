"""Tools of configured MCP servers within one response: which the request may use, their approval, their calls.

Not here: the protocol (server/mcp), the loop of turns (run.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError
from octavo.server.errors import ApiError
from octavo.server.mcp.servers import ToolServers
from octavo.server.mcp.session import Connection, ServerTool, ToolServerError
from octavo.server.responses.items import Item
from octavo.server.responses.tools import Toolbox

# What a request would send to a server of its own choice.
FOREIGN = ("connector_id", "tunnel_id", "headers", "authorization")


@dataclass(frozen=True, slots=True)
class Filter:
    """Some of a server's tools: by name, by whether they only read, or all (both None)."""

    names: frozenset[str] | None = None
    read_only: bool | None = None

    def takes(self, tool: ServerTool) -> bool:
        named = self.names is None or tool.name in self.names
        return named and (self.read_only is None or tool.read_only == self.read_only)


@dataclass(frozen=True, slots=True)
class ServerUse:
    """A request's `mcp` tool."""

    label: str
    allowed: Filter
    asks: tuple[Filter, ...]
    """Calls of these need approval…"""
    trusts: tuple[Filter, ...]
    """…but for these."""

    def needs_approval(self, tool: ServerTool) -> bool:
        return any(some.takes(tool) for some in self.asks) and not any(some.takes(tool) for some in self.trusts)


def parse_uses(tools: Sequence[Mapping[str, Any]], servers: ToolServers) -> list[ServerUse]:
    """The `mcp` tools of a request. `RequestError` for a server that is not configured."""
    uses: list[ServerUse] = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "mcp":
            continue
        where = f"tools[{i}]"
        label = tool.get("server_label")
        if not isinstance(label, str) or label not in servers.names:
            known = ", ".join(servers.names) or "none (start with --tool-server NAME=URL)"
            message = f"{where}.server_label: {str(label)[:64]!r} is no tool server of this one; configured: {known}"
            raise RequestError(message, param="tools")
        if any(use.label == label for use in uses):
            raise RequestError(f"{where}.server_label: {label!r} comes twice", param="tools")
        for name in FOREIGN:
            if tool.get(name):
                message = f"{where}.{name} is not taken: servers are reached as the operator configured them"
                raise RequestError(message, param="tools", code="unsupported")
        if tool.get("server_url") not in (None, servers.url(label)):
            message = f"{where}.server_url: addresses in requests are never contacted; leave it out"
            raise RequestError(message, param="tools", code="unsupported")
        asks, trusts = _approval(tool.get("require_approval"), f"{where}.require_approval")
        uses.append(ServerUse(label, _filter(tool.get("allowed_tools"), f"{where}.allowed_tools"), asks, trusts))
    return uses


def _filter(value: Any, where: str) -> Filter:
    if value is None:
        return Filter()
    names, read_only = value, None
    if isinstance(value, Mapping):
        names, read_only = value.get("tool_names"), value.get("read_only")
    is_list = names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))
    if not is_list or not isinstance(read_only, bool | None):
        raise RequestError(f"{where} must be a list of names, or an object with tool_names or read_only", param="tools")
    return Filter(frozenset(names) if names is not None else None, read_only)


def _approval(value: Any, where: str) -> tuple[tuple[Filter, ...], tuple[Filter, ...]]:
    """(what needs approval, what does not after all); OpenAI's default is that everything does."""
    if value == "never":
        return (), ()
    if value in (None, "always"):
        return (Filter(),), ()
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be always, never or an object", param="tools")
    always, never = value.get("always"), value.get("never")
    asks = _filter(always, f"{where}.always") if always is not None else Filter()
    return (asks,), () if never is None else (_filter(never, f"{where}.never"),)


@dataclass(frozen=True, slots=True)
class Served:
    """A tool as the model knows it, and whose it is."""

    label: str
    tool: ServerTool
    asks: bool


class ServerTools:
    """The server tools of one response; `close` always."""

    def __init__(self, servers: ToolServers, uses: Sequence[ServerUse]) -> None:
        self._servers = servers
        self._uses = uses
        self._connections: dict[str, Connection] = {}
        self._by_name: dict[str, Served] = {}
        self.listed: list[tuple[str, list[ServerTool]]] = []
        """(label, its allowed tools), once they are listed."""

    async def list_into(self, box: Toolbox) -> None:
        """Ask every server for its tools, and let the model call them. `ApiError` (424) when one gives none."""
        for use in self._uses:
            try:
                connection = await self._servers.connect(use.label)
                self._connections[use.label] = connection
                tools = [tool for tool in await connection.list_tools() if use.allowed.takes(tool)]
            except ToolServerError as error:
                raise ApiError(
                    424,
                    f"the tools of {use.label!r} can't be listed: {error}",
                    kind="external_connector_error",
                    param="tools",
                    code="tool_server_failed",
                ) from error
            self.listed.append((use.label, tools))
            for tool in tools:
                name = _shown_name(use.label, tool.name, box.names)
                box.add(name, tool.description, tool.input_schema, False, f"tool {tool.name!r} of {use.label!r}")
                self._by_name[name] = Served(use.label, tool, use.needs_approval(tool))

    def find(self, name: str) -> Served | None:
        """The server tool that the model knows by a name."""
        return self._by_name.get(name)

    def of(self, label: object, tool_name: object) -> list[str]:
        """The names that the model knows a server's tools by: of one tool, or of all (None)."""
        return [
            name
            for name, served in self._by_name.items()
            if served.label == label and tool_name in (None, served.tool.name)
        ]

    async def call(self, served: Served, arguments: str) -> dict[str, Any]:
        """`output` or `error` of an `mcp_call` item."""
        try:
            values = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            return _failed("mcp_protocol_error", -32602, "the arguments are no JSON object")
        try:
            result = await self._connections[served.label].call(served.tool.name, values)
        except ToolServerError as error:
            return _failed("mcp_protocol_error" if error.code else "http_error", error.code, str(error))
        if result.is_error:
            content = [{"type": "text", "text": result.text}]
            return {"output": None, "error": {"type": "mcp_tool_execution_error", "content": content}}
        return {"output": result.text, "error": None}

    def close(self) -> None:
        """Leave the servers."""
        while self._connections:
            self._connections.popitem()[1].close()


def _failed(kind: str, code: int, message: str) -> dict[str, Any]:
    return {"output": None, "error": {"type": kind, "code": code, "message": message}}


def _shown_name(label: str, name: str, taken: set[str]) -> str:
    """A function name for a tool: its own where that is allowed and free."""
    shown = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:128]
    return shown if shown and shown not in taken else f"{label}__{shown}"[:128]


def approved_calls(items: Sequence[Item]) -> list[Item]:
    """Approval requests among a conversation's items that were approved and not called yet, in order."""
    approved: set[str] = set()
    done: set[str] = set()
    for item in items:
        name = item.get("approval_request_id")
        if isinstance(name, str) and item["type"] == "mcp_call":
            done.add(name)
        elif isinstance(name, str) and item["type"] == "mcp_approval_response":
            (approved if item.get("approve") is True else done).add(name)
    wanted = approved - done
    return [item for item in items if item["type"] == "mcp_approval_request" and item["id"] in wanted]
