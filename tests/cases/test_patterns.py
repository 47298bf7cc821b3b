"""SE-02 and SE-03: deep and explosive schemas, patterns, grammars and tool calls cost their own caller alone."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from octavo.server.reasoning.table import REASONING_FORMATS, reasoning_format
from octavo.server.tools.base import Tools
from octavo.server.tools.table import TOOL_FORMATS, tool_format
from tests.cases.calls import BYSTANDER, CANARY, CHAT, TEXT, choice_of, post, stream, watched

LIMIT_S = 15.0
"""The engine's own limit on a compilation is 5 s; the rest is room for a busy machine."""
GAP_S = 3.0
HI = [{"role": "user", "content": "x"}]


def nested(depth: int, wrap: tuple[str, str], inner: str = "{}") -> bytes:
    """A JSON schema of a depth, as text: no encoder of a client goes as deep."""
    schema = wrap[0] * depth + inner + wrap[1] * depth
    return b'{"prompt":"x","max_tokens":4,"structured_outputs":{"json":' + schema.encode() + b"}}"


def text(**constraint: Any) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 4, "structured_outputs": constraint}).encode()


def chain(count: int) -> dict[str, Any]:
    """$defs that refer to each other."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**links, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


# What must be refused: case, path, body.
DEEP: dict[str, tuple[str, bytes]] = {
    "array": (TEXT, nested(20_000, ('{"type":"array","items":', "}"))),
    "anyOf": (TEXT, nested(20_000, ('{"anyOf":[', "]}"))),
    "array within the body's limit": (TEXT, nested(200, ('{"type":"array","items":', "}"))),
    "regex": (TEXT, text(regex="(" * 50_000 + "a" + ")" * 50_000)),
    "pattern": (TEXT, text(json={"type": "string", "pattern": "(" * 50_000 + "a" + ")" * 50_000})),
    "groups": (TEXT, text(grammar="root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000)),
    "content": (CHAT, b'{"messages":[{"role":"user","content":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"),
    "tools": (
        CHAT,
        b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":'
        + b'{"type":"array","items":' * 20_000
        + b"{}"
        + b"}" * 20_000
        + b"}}]}",
    ),
}
# What must be answered or refused, in time.
HEAVY: dict[str, tuple[str, bytes]] = {
    "refs": (TEXT, text(json=chain(5000))),
    "rules": (
        TEXT,
        text(grammar="root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000)) + 'r5000 ::= "a"'),
    ),
    "stars": (TEXT, text(regex="(((a*)*)*)*")),
    "left recursion": (TEXT, text(grammar='root ::= root "a" | "a"')),
    "repeat": (TEXT, text(regex="a{1000000}")),
    "repeat twice": (TEXT, text(regex="(a{1000}){1000}")),
    "ambiguous": (TEXT, text(regex="(a|aa|aaa){500}b{0,5000}")),
    "two classes": (TEXT, text(regex="[^>]{0,2000}x[^<]{0,2000}")),
    "dots": (TEXT, text(regex="(.*a){25}")),
    "maxLength": (TEXT, text(json={"type": "string", "maxLength": 10_000_000})),
    "enum": (TEXT, text(json={"enum": [f"value {i}" for i in range(20_000)]})),
    "optional properties": (
        TEXT,
        text(json={"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}}),
    ),
    "choice": (TEXT, text(choice=[f"choice {i}" for i in range(50_000)])),
}


async def gaps(client: httpx.AsyncClient, stop: asyncio.Event) -> float:
    """The longest time between two events of streams, until told to stop."""
    longest = 0.0
    while not stop.is_set():
        async with client.stream("POST", TEXT, json={**BYSTANDER, "stream": True}) as answer:
            last_s = time.monotonic()
            async for _ in answer.aiter_lines():
                longest, last_s = max(longest, time.monotonic() - last_s), time.monotonic()
                if stop.is_set():
                    break
    return longest


@pytest.mark.parametrize("case", DEEP)
async def test_se02_too_deep(case: str, client: httpx.AsyncClient) -> None:
    path, body = DEEP[case]
    start_s = time.monotonic()
    status, answer = await post(client, path, body)
    assert time.monotonic() - start_s < LIMIT_S
    assert status == 400, answer
    assert answer["error"]["message"]
    assert (await choice_of(client, TEXT, **CANARY))["finish_reason"] == "length"


async def test_se02_a_depth_of_thirty_works(client: httpx.AsyncClient) -> None:
    schema: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 3}
    for _ in range(30):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    choice = await choice_of(
        client, TEXT, prompt="x", max_tokens=400, structured_outputs={"json": schema, "disable_any_whitespace": True}
    )
    assert choice["finish_reason"] == "stop"
    value = json.loads(choice["text"])
    for _ in range(30):
        value = value["a"]
    assert value in (1, 2, 3)


async def test_se03_explosive_patterns(client: httpx.AsyncClient) -> None:
    alone = await stream(client, TEXT, **BYSTANDER)
    canary = (await choice_of(client, TEXT, **CANARY))["text"]
    stop = asyncio.Event()
    watching = asyncio.create_task(gaps(client, stop))
    for case, (path, body) in HEAVY.items():
        async with watched(client, alone, canary):
            start_s = time.monotonic()
            status, answer = await post(client, path, body)
            assert status in (200, 400), (case, answer)
            assert time.monotonic() - start_s < LIMIT_S, case
    stop.set()
    assert await watching < GAP_S


NASTY = (
    "[f(",
    "<tool_call>{",
    "((((",
    '{"name":',
    "<think>",
    "[TOOL_CALLS]",
    "<|tool_call|>",
    "<function=f><parameter=a>",
)


def seconds(parser: Any, text: str) -> float:
    """Processor time of reading a text in pieces of a few characters."""
    start_s = time.process_time()
    for at in range(0, len(text), 7):
        parser.feed(text[at : at + 7])
    parser.finish()
    return time.process_time() - start_s


TOOLS = Tools([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
PARSERS = {
    **{f"tools {name}": lambda name=name: tool_format(name).parser(TOOLS) for name in TOOL_FORMATS},
    **{f"reasoning {name}": lambda name=name: reasoning_format(name).parser(False) for name in REASONING_FORMATS},
}


@pytest.mark.parametrize("name", PARSERS)
def test_se03_parsers_are_linear(name: str) -> None:
    """Four times the text takes at most ten times as long; a quadratic parser takes sixteen times."""
    for piece in NASTY:
        short_s = min(seconds(PARSERS[name](), piece * (10_000 // len(piece))) for _ in range(2))
        long_s = min(seconds(PARSERS[name](), piece * (40_000 // len(piece))) for _ in range(2))
        assert long_s < max(10 * short_s, 0.25), (piece, short_s, long_s)
