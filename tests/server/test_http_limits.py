"""Slow, endless and silent clients against a real listener with short limits: each is answered or hung up on."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest
from starlette.types import Receive, Scope, Send

from octavo.server.http_protocol import HttpLimits
from octavo.server.listening import listen
from octavo.server.service import make_server

LIMITS = HttpLimits(
    max_connections=4, max_headers=10, head_timeout_s=0.2, body_window_s=0.2, min_body_bytes=8, stall_timeout_s=0.3
)
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo:
    """Answers with the size of the body; /flood with more than any buffer holds."""

    def __init__(self) -> None:
        self.num_disconnected = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_disconnected += 1
                return
            size, more = size + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/flood":
            watcher = asyncio.create_task(receive())
            while not watcher.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)
            self.num_disconnected += 1
            return
        await send({"type": "http.response.body", "body": b"%d" % size})


@pytest.fixture
def app() -> Echo:
    return Echo()


@pytest.fixture
async def port(app: Echo) -> AsyncIterator[int]:
    listener = listen("127.0.0.1", 0)
    server = make_server(app, LIMITS)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    await serving


async def connect(port: int) -> Pair:
    return await asyncio.open_connection("127.0.0.1", port)


async def answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and error code of an answer that ends with the connection."""
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("head", "ending"),
    [
        (b"GET /ends HTTP/1.0\r\n\r\n", b"\r\n\r\n0"),
        (b"GET /ends HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", b"\r\n\r\n0"),
        (b"GET /ends HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"\r\n\r\n1\r\n0\r\n0\r\n\r\n"),
    ],
)
async def test_an_old_client_gets_no_chunks(port: int, head: bytes, ending: bytes) -> None:
    """What has no length ends with the connection, also where the client asked to keep it (ab -k)."""
    reader, writer = await connect(port)
    writer.write(head)
    got = await asyncio.wait_for(reader.read(), 10)
    assert got.endswith(ending)
    assert (b"chunked" in got) == (b"HTTP/1.1" in head)


@pytest.mark.parametrize("start", [b"", b"GET /", b"POST / HTTP/1.1\r\nHost: x\r\nX-A: b\r\n"])
async def test_heads_that_do_not_end(port: int, start: bytes) -> None:
    reader, writer = await connect(port)
    writer.write(start)
    assert await answer(reader) == (408, "too_slow")


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_an_error_body(port: int, text: bytes) -> None:
    reader, writer = await connect(port)
    writer.write(text)
    assert await answer(reader) == (400, "invalid_http")


async def test_upgrades_are_answered_as_ordinary_requests(port: int) -> None:
    reader, writer = await connect(port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert b" 200 OK" in await asyncio.wait_for(reader.readline(), 10)


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: x\r\n", "timeout_error"),
        (b"GET /v1/models HTTP/1.1\r\nAnthropic-Version: 2023-06-01\r\nHost: x\r\nX: ", "timeout_error"),
        (b"POST /v1/messages HTTP/1.1\r\n" + b"X-A: b\r\n" * 12, "request_too_large"),
        (b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n", "timeout_error"),
    ],
)
async def test_refusals_of_messages_are_in_their_words(port: int, head: bytes, kind: str) -> None:
    reader, writer = await connect(port)
    writer.write(head)
    _, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    answer = json.loads(body)
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)


async def test_a_head_that_drips_is_not_prolonged(port: int) -> None:
    reader, writer = await connect(port)
    reading = asyncio.create_task(answer(reader))
    writer.write(b"GET / HTTP/1.1\r\n")
    while not reading.done():
        writer.write(b"X-A: b\r\n")
        await asyncio.wait({reading}, timeout=0.05)
    assert (await reading) == (408, "too_slow")


async def test_bodies_that_stop_or_drip(port: int, app: Echo) -> None:
    for drips in (False, True):
        reader, writer = await connect(port)
        reading = asyncio.create_task(answer(reader))
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n12345678")
        while not reading.done():
            writer.write(b"x" if drips else b"")
            await asyncio.wait({reading}, timeout=0.05)
        assert (await reading) == (408, "too_slow")
    while app.num_disconnected < 2:
        await asyncio.sleep(0)


async def test_a_slow_but_steady_body_is_read(port: int) -> None:
    reader, writer = await connect(port)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100\r\n\r\n")
    reading = asyncio.create_task(reader.read())
    for _ in range(10):
        writer.write(b"0123456789")
        await asyncio.wait({reading}, timeout=0.05)
    assert (await reading).endswith(b"\r\n100\r\n0\r\n\r\n")


@pytest.mark.parametrize("num_headers", [10, 11, 5000])
async def test_many_headers(port: int, num_headers: int) -> None:
    reader, writer = await connect(port)
    lines = b"".join(b"X-%d: 1\r\n" % i for i in range(num_headers - 1))
    writer.write(b"POST / HTTP/1.1\r\nConnection: close\r\n" + lines + b"\r\n{}")
    if num_headers == 10:
        assert b" 200 OK" in await reader.readline()
    else:
        assert await answer(reader) == (431, "headers_too_large")


async def test_more_connections_than_allowed(port: int) -> None:
    pairs = [await connect(port) for _ in range(4)]
    for _, writer in pairs:
        writer.write(b"GET / HTTP/1.1\r\n")
    reader, _ = await connect(port)
    assert await answer(reader) == (503, "unavailable")
    for _, writer in pairs:
        writer.write(b"Host: x\r\nConnection: close\r\n\r\n")
    for reader, writer in pairs:
        assert b" 200 OK" in await reader.readline()
        writer.close()


async def test_a_client_that_reads_nothing(port: int, app: Echo) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        while not app.num_disconnected:
            await asyncio.sleep(0.01)
