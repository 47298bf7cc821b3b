"""A session with an MCP server over streamable HTTP, through the `mcp` package (imported in this file only).

The package's client must be entered and left by one task, so each session has a task of its own that holds it open.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from mcp.client.client import Client
from mcp.shared.exceptions import MCPError

from octavo.server.mcp.session import ServerTool, ToolResult, ToolServerError

T = TypeVar("T")

MAX_PAGES = 32
LEAVE_S = 5.0
MAX_RESULT_CHARS = 256 * 1024


_OPEN: set[asyncio.Task[None]] = set()
"""Tasks that hold sessions: the event loop itself does not keep them alive."""


class McpConnection:
    """One session; made by `connect`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._done = asyncio.Event()
        self._task = asyncio.create_task(self._hold(url))
        _OPEN.add(self._task)
        self._task.add_done_callback(_OPEN.discard)

    async def _hold(self, url: str) -> None:
        try:
            async with Client(url, read_timeout_seconds=self._timeout_s) as client:
                self._client.set_result(client)
                await self._done.wait()
        except Exception as error:
            if not self._client.done():
                self._client.set_exception(_plain(error))
                self._client.exception()  # seen, even when nobody waits any more

    async def _ask(self, question: Awaitable[T]) -> T:
        """The answer, within the time limit, and only while the session is open."""
        asked = asyncio.ensure_future(question)
        try:
            await asyncio.wait({asked, self._task}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        except Exception as error:
            raise _plain(error) from error
        finally:
            asked.cancel()
        if self._task.done():
            raise ToolServerError("the tool server closed the connection")
        raise ToolServerError(f"the tool server gave no answer within {self._timeout_s:g} s (--tool-timeout-s)")

    async def opened(self) -> None:
        """Wait until the session is open."""
        await self._ask(asyncio.shield(self._client))

    async def list_tools(self) -> list[ServerTool]:
        client = await self._client
        tools: list[ServerTool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._ask(client.list_tools(cursor=cursor))
            for tool in page.tools:
                notes = tool.annotations.model_dump(by_alias=True, exclude_none=True) if tool.annotations else None
                tools.append(ServerTool(tool.name, tool.description or "", dict(tool.input_schema), notes))
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise ToolServerError(f"the tool server's list has more than {MAX_PAGES} pages")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        client = await self._client
        result = await self._ask(client.call_tool(name, dict(arguments)))
        texts = [getattr(block, "text", None) or f"[{block.type} left out]" for block in result.content]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content)]
        text = "\n".join(texts)
        if len(text) > MAX_RESULT_CHARS:
            text = text[:MAX_RESULT_CHARS] + f"\n[cut after {MAX_RESULT_CHARS} characters]"
        return ToolResult(text, bool(result.is_error))

    def close(self) -> None:
        """End the session; a server that does not take leave in time is left."""
        self._done.set()
        asyncio.get_running_loop().call_later(LEAVE_S, self._task.cancel)


def _plain(error: BaseException) -> ToolServerError:
    """The innermost error of groups, in one line; addresses are left out of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ToolServerError):
        return error
    code = error.code if isinstance(error, MCPError) else 0
    reason = str(error).splitlines()[0][:300] if isinstance(error, MCPError) and str(error) else type(error).__name__
    return ToolServerError(f"the tool server failed: {reason}", code)


async def connect(url: str, timeout_s: float) -> McpConnection:
    """An open session. `ToolServerError` when the server can't be reached or refuses."""
    connection = McpConnection(url, timeout_s)
    try:
        await connection.opened()
    except BaseException:
        connection.close()
        raise
    return connection
