"""The Responses API on the real engine: streams equal whole answers, schemas hold, conversations reuse the cache."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

Body = dict[str, Any]
ASKED: Body = {"model": "tiny", "input": "one two three four five six seven", "temperature": 0, "max_output_tokens": 20}
SCHEMA: Body = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["size", "count"],
    "additionalProperties": False,
}


@pytest.fixture
async def api(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_streams_equal_whole_answers(api: openai.AsyncOpenAI) -> None:
    whole = await api.responses.create(**ASKED)
    events = [event async for event in await api.responses.create(**ASKED, stream=True)]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = events[-1].response
    assert whole.output_text == final.output_text == "".join(deltas) != ""
    assert whole.usage is not None
    assert final.usage is not None
    assert whole.usage.output_tokens == final.usage.output_tokens
    assert (whole.status, final.status) == (final.status, whole.status)


@pytest.mark.parametrize("stream", [False, True])
async def test_schemas_hold(api: openai.AsyncOpenAI, stream: bool) -> None:
    form = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}}
    asked: Body = {**ASKED, "text": form, "temperature": 1, "max_output_tokens": 100, "extra_body": {"seed": 3}}
    if stream:
        async with api.responses.stream(**asked) as events:
            answer: Any = await events.get_final_response()
    else:
        answer = await api.responses.create(**asked)
    value = json.loads(answer.output_text)
    assert set(value) == {"size", "count"}
    assert value["size"] in ("small", "large")
    assert 0 <= value["count"] <= 99
    assert answer.status == "completed"


async def test_a_schema_that_can_not_be_met(api: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "thing", "schema": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(**{**ASKED, "text": form, "stream": stream})
        assert refused.value.param == "text.format"


async def test_conversations_reuse_the_cache(api: openai.AsyncOpenAI) -> None:
    first = await api.responses.create(**{**ASKED, "input": "eight nine ten eleven twelve " * 3})
    second = await api.responses.create(**{**ASKED, "input": "and?", "previous_response_id": first.id})
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16 - 16
