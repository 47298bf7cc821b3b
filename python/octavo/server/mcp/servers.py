"""The configured tool servers by name.

The library that speaks MCP is in client.py, which is imported when a request first uses a server.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from octavo.errors import ConfigError
from octavo.server.mcp.session import Connection

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


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
