"""Whatever a body says, a parser gives a request or a RequestError; whatever bytes come, the listener lives."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from octavo.errors import RequestError
from octavo.server.http_protocol import HttpLimits
from octavo.server.listening import listen
from octavo.server.openapi import BODIES, body_schema
from octavo.server.schema.chat import parse_chat
from octavo.server.schema.completions import parse_completion
from octavo.server.schema.messages import parse_count, parse_messages
from octavo.server.schema.parse import load_json
from octavo.server.schema.responses import parse_responses
from octavo.server.schema.tokenize import parse_tokenize
from octavo.server.service import make_server

PARSERS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "/v1/chat/completions": lambda body: parse_chat(body, {}),
    "/v1/completions": lambda body: parse_completion(body, {}),
    "/v1/messages": lambda body: parse_messages(body, {}),
    "/v1/messages/count_tokens": parse_count,
    "/v1/responses": lambda body: parse_responses(body, {}),
    "/tokenize": parse_tokenize,
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "system", "tool", "text", "function", "auto", "json_schema", "x" * 5000])
)
NAMES = st.sampled_from(
    ["role", "content", "type", "text", "name", "function", "parameters", "id", "tool_calls", "schema", "input"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


@pytest.mark.parametrize("path", PARSERS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_fields_of_any_shape(path: str, data: st.DataObject) -> None:
    schema = body_schema(BODIES["POST", path])
    fields = st.dictionaries(st.sampled_from(sorted(schema["properties"])), VALUES, max_size=6)
    body = data.draw(fields)
    for name in schema.get("required", []):
        body.setdefault(name, data.draw(VALUES))
    assert outcome(PARSERS[path], body) is not None


def outcome(work: Callable[[Any], object], given: Any) -> object:
    """What comes of it: a result, or the refusal. Any other exception is a bug."""
    try:
        return work(given)
    except RequestError as error:
        return error


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_bytes_of_any_kind(body: bytes) -> None:
    got = outcome(load_json, body)
    assert isinstance(got, dict) or (isinstance(got, RequestError) and got.code == "invalid_json")


@pytest.fixture
async def port(app: Starlette) -> AsyncIterator[int]:
    listener = listen("127.0.0.1", 0)
    server = make_server(app, HttpLimits(head_timeout_s=0.3, body_window_s=0.3))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    await serving


GOOD = (
    b'POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"prompt": "x"}'
)


async def exchange(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_damaged_requests(port: int, caplog: pytest.LogCaptureFixture) -> None:
    r = random.Random(3)

    def damaged() -> bytes:
        sent = bytearray(GOOD * r.randrange(1, 3))
        for _ in range(r.randrange(1, 6)):
            sent[r.randrange(len(sent))] = r.randrange(256)
        return bytes(sent[: r.randrange(len(sent) + 1)] if r.random() < 0.3 else sent)

    answers = [await asyncio.gather(*(exchange(port, damaged()) for _ in range(40))) for _ in range(10)]
    for answer in (each for row in answers for each in row):
        assert answer == b"" or answer.startswith(b"HTTP/1.")
        assert b" 500 " not in answer[:20]
    assert b" 200 OK" in await exchange(port, GOOD.replace(b"Host", b"Connection: close\r\nHost"))
    assert not [record for record in caplog.records if record.exc_info]
