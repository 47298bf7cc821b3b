"""What a session with a tool server gives: tools, results of calls, and its one error.

Not here: who speaks MCP (client.py), and which servers there are (servers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class ToolServerError(Exception):
    """A tool server can't be reached, is too slow, or breaks the protocol. `code` is its own, if it gave one."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool as its server lists it."""

    name: str
    description: str
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None = None

    @property
    def read_only(self) -> bool:
        """The server says that a call changes nothing."""
        return bool((self.annotations or {}).get("readOnlyHint"))


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave: its text, and whether the tool calls that an error."""

    text: str
    is_error: bool = False


class Connection(Protocol):
    """One session with a server. Questions raise `ToolServerError`."""

    async def list_tools(self) -> Sequence[ServerTool]: ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult: ...

    def close(self) -> None: ...
