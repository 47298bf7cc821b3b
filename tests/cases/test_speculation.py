"""Collected faults of speculation over HTTP. Names of tests begin with the ids of the faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.cases.calls import CHAT, TEXT, choice_of, strict_json
from tests.cases.conftest import ROOMY
from tests.server.serving import ServerProcess

FLAGS = ("--dtype", "float32", "--block-size", "16", "--cpu-threads", "1", "--served-model-name", "tiny")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": ["nope", None]},
        "b": {"type": "array", "items": {"const": "nope"}, "minItems": 4, "maxItems": 6},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
REPEAT = " ".join(["Repeat exactly:", *["{'a': nope, 'b': nope}"] * 3])
# A token of this model is a byte, and it likes blanks: the answer takes more tokens than the report says.
FORCED: dict[str, Any] = {
    "messages": [{"role": "user", "content": REPEAT}],
    "max_tokens": 500,
    "structured_outputs": {"json": SCHEMA},
}


def served(model: Path, speculation: str) -> Iterator[str]:
    flags = (*FLAGS, *ROOMY, "--runner", "embedded", "--speculative-config", speculation)
    with ServerProcess("--model", str(model), *flags) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def plain_url(model: Path) -> Iterator[str]:
    yield from served(model, "off")


@pytest.fixture(scope="module")
def drafting_url(model: Path) -> Iterator[str]:
    yield from served(model, json.dumps(DRAFTS))


@pytest.fixture
async def plain(plain_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=plain_url, timeout=60) as client:
        yield client


@pytest.fixture
async def drafting(drafting_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=drafting_url, timeout=60) as client:
        yield client


async def counter(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"octavo:spec_decode_{name}_total")))


async def forced(client: httpx.AsyncClient, seed: int) -> str:
    """The text of a constrained call, greedy for even seeds."""
    choice = await choice_of(client, CHAT, **FORCED, temperature=seed % 2, seed=seed)
    assert choice["finish_reason"] == "stop"
    text: str = choice["message"]["content"]
    return text


async def free(client: httpx.AsyncClient, seed: int) -> str:
    fields = {"prompt": REPEAT[: 10 + 3 * seed], "max_tokens": 60, "temperature": seed % 3 / 4, "ignore_eos": True}
    choice = await choice_of(client, TEXT, **fields, seed=seed)
    text: str = choice["text"]
    return text


async def test_so08_drafts_and_grammars(plain: httpx.AsyncClient, drafting: httpx.AsyncClient) -> None:
    alone = [await free(plain, seed) for seed in range(10)], [await forced(plain, seed) for seed in range(30)]
    together = [forced(drafting, seed) for seed in range(30)]
    neighbours = [free(drafting, seed) for seed in range(10)]
    texts = await asyncio.gather(*neighbours, *together)
    for text in texts[10:]:
        jsonschema.validate(strict_json(text), SCHEMA)
    assert texts == [*alone[0], *alone[1]]
    drafts, drafted, accepted = [
        await counter(drafting, name) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    ]
    assert 0 < accepted <= drafted <= 4 * drafts
    assert await counter(plain, "num_drafts") == 0
    assert (await drafting.get("/health")).status_code == 200
