"""The configured tool servers by name, and what a connection to one does.

The library that speaks MCP is in client.py, which is imported when a request first uses a server.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from octavo.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


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


class ToolServers:
    """Names and addresses.

    Args:
        options: NAME=URL each.
        timeout_s: Longest wait for one answer of a server.

    Raises:
        ConfigError: An option is malformed, a name comes twice, or the `mcp` package is missing.
    """

    def __init__(self, options: Sequence[str], timeout_s: float) -> None:
        self._urls: dict[str, str] = {}
        self._timeout_s = timeout_s
        for option in options:
            name, _, url = option.partition("=")
            if not _NAME.fullmatch(name) or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
                raise ConfigError(f"--tool-server: {option[:200]!r} is not NAME=http(s)://…", "tool_server")
            if name in self._urls:
                raise ConfigError(f"--tool-server: the name {name!r} comes twice", "tool_server")
            self._urls[name] = url
        if self._urls and importlib.util.find_spec("mcp") is None:
            raise ConfigError("--tool-server needs the mcp package: pip install 'octavo[mcp]'", "tool_server")

    @property
    def names(self) -> list[str]:
        return list(self._urls)

    def url(self, name: str) -> str:
        return self._urls[name]

    async def connect(self, name: str) -> Connection:
        """A new session with a configured server. Errors: `ToolServerError`."""
        from octavo.server.mcp.client import connect

        return await connect(self._urls[name], self._timeout_s)
