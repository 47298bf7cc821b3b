"""HTTP calls of the cases: whole answers, strictly parsed streams, and a stream that watches over its neighbours."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
TOLERANCE = 1e-4
"""Most that a logprob in float32 may differ when other sequences share its steps."""

BYSTANDER = {"prompt": "Once", "max_tokens": 300, "temperature": 0.9, "seed": 11, "logprobs": 1, "ignore_eos": True}
CANARY = {"prompt": "The capital", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def strict_json(text: str | bytes) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any] | bytes) -> tuple[int, Any]:
    """(status, parsed body)."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await client.post(path, content=content, headers={"content-type": "application/json"})
    return answer.status_code, strict_json(answer.content)


async def choice_of(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    """The only choice of a call that must succeed."""
    status, answer = await post(client, path, body)
    assert status == 200, answer
    assert len(answer["choices"]) == 1
    choice: dict[str, Any] = answer["choices"][0]
    return {**choice, "usage": answer["usage"]}


@dataclass
class Streamed:
    """A stream's events, and what they come to for its first choice."""

    chunks: list[dict[str, Any]] = field(default_factory=list)

    def of(self, index: int) -> list[dict[str, Any]]:
        """The choice's parts, in order."""
        return [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in self.of(index))

    @property
    def logprobs(self) -> list[float]:
        return [value for c in self.of(0) if c["logprobs"] for value in c["logprobs"]["token_logprobs"]]

    @property
    def usages(self) -> list[dict[str, Any] | None]:
        return [chunk.get("usage") for chunk in self.chunks]


async def stream(client: httpx.AsyncClient, path: str, **body: Any) -> Streamed:
    """Read a stream to its end; its framing must be exact: one data line and one blank line an event, [DONE] last."""
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        raw = b"".join([part async for part in answer.aiter_raw()])
    *events, rest = raw.decode("utf-8").split("\n\n")
    assert rest == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return Streamed([strict_json(event.removeprefix("data: ")) for event in events])


def near(a: list[float], b: list[float]) -> bool:
    """Whether logprobs are those of the same sequence."""
    return len(a) == len(b) and all(abs(x - y) < TOLERANCE for x, y in zip(a, b, strict=True))


@asynccontextmanager
async def watched(client: httpx.AsyncClient, alone: Streamed, canary: str) -> AsyncIterator[None]:
    """While the block runs, a seeded stream must get the text and the logprobs that it gets alone; afterwards the
    server is healthy and answers as before."""
    async with client.stream("POST", TEXT, json={**BYSTANDER, "stream": True}) as answer:
        lines = answer.aiter_lines()
        first = await anext(lines)
        yield
        rest = [line async for line in lines]
    data = [line.removeprefix("data: ") for line in (first, *rest) if line]
    assert data.pop() == "[DONE]"
    beside = Streamed([strict_json(event) for event in data])
    assert beside.text() == alone.text()
    assert near(beside.logprobs, alone.logprobs)
    assert (await choice_of(client, TEXT, **CANARY))["text"] == canary
    assert (await client.get("/health")).status_code == 200
