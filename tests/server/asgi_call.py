"""One ASGI call, driven message by message: for what httpx's transport hides (streaming, disconnects)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message


class AsgiCall:
    """Starts a POST; `receive` gives the body, then waits for `disconnect`."""

    def __init__(
        self, app: ASGIApp, path: str, body: dict[str, Any], headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self._body: bytes | None = json.dumps(body).encode()
        self._gone = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *headers],
            "client": ("127.0.0.1", 1),
            "server": ("octavo", 80),
            "scheme": "http",
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))  # type: ignore[arg-type]

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.put_nowait(message)

    def disconnect(self) -> None:
        self._gone.set()

    async def next(self) -> Message:
        """The next message that the app sends."""
        return await asyncio.wait_for(self.sent.get(), 5)

    async def rest(self) -> bytes:
        """All body bytes from here to the end."""
        body = b""
        while True:
            message = await self.next()
            body += message.get("body", b"")
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                return body


def events(body: bytes) -> list[Any]:
    """The JSON of a stream's events, "[DONE]" as it is; checks the framing strictly."""
    text = body.decode("ascii")
    assert text.endswith("\n\n")
    out: list[Any] = []
    for block in text[:-2].split("\n\n"):
        assert block.startswith("data: ")
        assert "\n" not in block
        data = block.removeprefix("data: ")
        out.append(data if data == "[DONE]" else json.loads(data))
    return out
