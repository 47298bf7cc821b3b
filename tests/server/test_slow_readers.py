"""Calls that are cut, and a server that ends, while a client takes its time to read: the client still gets an error as
its last event, or is hung up on, and nobody reads a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from typing import Any

import pytest
from asgi_call import AsgiCall
from fake_engine import FakeDelta, FakeLLM
from scripted import CALLED, Scripted, call
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from octavo.config import ServerConfig
from octavo.server.app import make_app
from octavo.server.http_protocol import HttpLimits
from octavo.server.listening import listen
from octavo.server.mcp.session import Connection, ServerTool, ToolResult
from octavo.server.service import make_server

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}


class SlowCall(AsgiCall):
    """Takes what is sent up to a message with `mark` in it; that one only after `go_on`."""

    def __init__(self, app: Any, path: str, body: dict[str, Any], mark: bytes) -> None:
        self._mark = mark
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        super().__init__(app, path, {**body, "stream": True}, headers=[(b"x-request-id", b"job")])

    async def _send(self, message: Message) -> None:
        if self._mark in message.get("body", b""):
            self.reached.set()
            await self.go_on.wait()
        await super()._send(message)

    async def outcome(self) -> bytes:
        """All that comes once it is read; errors of the handler are raised."""
        self.go_on.set()
        body = await self.rest()
        await self.task
        return body


@pytest.mark.parametrize("path", BODIES)
async def test_a_call_is_cut_while_its_reader_is_slow(app: Starlette, llm: FakeLLM, path: str) -> None:
    llm.script = lambda request: [[FakeDelta(text=text, token_ids=[1])] for text in ("one", "two", "six")]
    slow = SlowCall(app, path, BODIES[path], b"two")
    await asyncio.wait_for(slow.reached.wait(), 5)
    assert await app.state.context.drain(0) == 1
    assert not app.state.context.live.calls
    body = await slow.outcome()
    assert b"six" not in body
    assert b"shut down before this request was finished" in body.splitlines()[-2]
    assert llm.streams[0].closed


class Calculator:
    """A connection to a tool server; `lists` when it tells its tools."""

    def __init__(self, lists: asyncio.Event) -> None:
        self._lists = lists
        self.asked = asyncio.Event()

    async def list_tools(self) -> list[ServerTool]:
        self.asked.set()
        await self._lists.wait()
        return [ServerTool("add", "", {"type": "object"})]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        raise AssertionError("the response was ended before")

    def close(self) -> None:
        pass


def with_tools(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, calculator: Calculator) -> tuple[Starlette, Any]:
    """An app with a tool server, and a body that uses it."""
    app = make_app(llm, ServerConfig(tool_server=["calc=http://127.0.0.1:9"]))  # type: ignore[arg-type]

    async def connect(name: str) -> Connection:
        return calculator

    monkeypatch.setattr(app.state.context.tool_servers, "connect", connect)
    tool = {"type": "mcp", "server_label": "calc", "require_approval": "never"}
    return app, {"input": "hi", "tools": [tool]}


async def test_a_response_is_ended_between_two_turns_while_its_reader_is_slow(
    llm: FakeLLM, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = asyncio.Event()
    lists.set()
    app, body = with_tools(llm, monkeypatch, Calculator(lists))
    scripted.say([*call(0, "add", "{}"), *CALLED])
    slow = SlowCall(app, "/v1/responses", body, b"mcp_call.in_progress")
    await asyncio.wait_for(slow.reached.wait(), 5)
    assert [app.state.context.abort("job"), app.state.context.abort("job")] == [1, 0]
    assert b"ended by an operator" in (await slow.outcome()).splitlines()[-2]


async def test_a_response_is_ended_while_a_server_lists_its_tools(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calculator = Calculator(asyncio.Event())
    app, body = with_tools(llm, monkeypatch, calculator)
    sent = AsgiCall(app, "/v1/responses", body)
    await asyncio.wait_for(calculator.asked.wait(), 5)
    assert await app.state.context.drain(0) == 1
    assert (await sent.next())["status"] == 503
    await sent.task


async def test_a_server_that_ends_hangs_up_on_who_does_not_read(caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        watcher = asyncio.create_task(receive())
        while not watcher.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        ended.set()

    listener = listen("127.0.0.1", 0)
    server = make_server(flood, HttpLimits(flush_timeout_s=0.05))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    with socket.create_connection(listener.getsockname()) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await asyncio.to_thread(client.recv, 10)
        server.should_exit = True
        await asyncio.wait_for(serving, 30)
    assert ended.is_set()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_server_that_ends_waits_for_no_handler(
    app: Starlette, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def stuck(*args: Any, **kwargs: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    monkeypatch.setattr("octavo.server.routes.completions.read_json", stuck)
    monkeypatch.setattr("octavo.server.service.HANDLERS_S", 1)
    listener = listen("127.0.0.1", 0)
    server = make_server(app, HttpLimits(flush_timeout_s=0.05))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    with socket.create_connection(listener.getsockname()) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        await asyncio.wait_for(begun.wait(), 30)
        server.should_exit = True
        await asyncio.wait_for(serving, 30)
        await asyncio.wait_for(cancelled.wait(), 30)
        await asyncio.sleep(0)
    assert "Traceback" not in caplog.text
    assert [record.levelno for record in caplog.records if record.levelno >= logging.WARNING] == [logging.ERROR]
