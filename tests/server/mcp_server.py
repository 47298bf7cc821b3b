"""A tool server for tests: the `mcp` package's own, over HTTP, in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations


class ToolServerThread:
    """Serves `url` from construction to `close`; `calls` are the calls that came."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/mcp"
        app = self._make().streamable_http_app()
        config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self._thread.start()

    def _make(self) -> MCPServer[object]:
        server: MCPServer[object] = MCPServer("test")

        @server.tool(annotations=ToolAnnotations(read_only_hint=True))
        def add(a: int, b: int) -> str:
            """Add numbers."""
            self.calls.append(("add", (a, b)))
            return str(a + b)

        @server.tool()
        def fail() -> str:
            """Always fails."""
            self.calls.append(("fail", None))
            raise ToolError("it broke")

        @server.tool()
        async def wait() -> str:
            """Never answers."""
            self.calls.append(("wait", None))
            await asyncio.Event().wait()
            return ""

        return server

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._listener.close()
