"""One request to an ASGI app in this process, without HTTP and without a connection that could break."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from octavo.server.errors import openai_object, to_api_error


@dataclass(slots=True)
class Answer:
    """Status and body."""

    status: int = 500
    body: bytes = b""


async def post(app: ASGIApp, path: str, body: bytes, request_id: str) -> Answer:
    """The whole answer to a POST of JSON."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "scheme": "http",
        "state": {"request_id": request_id},
    }
    answer = Answer()
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
        else:
            answer.body += message.get("body", b"")

    try:
        await app(scope, receive, send)
    except Exception as error:  # as the gate would answer it: the other requests of the batch go on
        api = to_api_error(error)
        return Answer(api.status, json.dumps({"error": openai_object(api)}).encode())
    return answer
