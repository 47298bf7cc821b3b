"""Case TC-08: the Messages API in the corners, on the real engine: one shape of errors, order of events, counts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.cases.calls import post, strict_json

Body = dict[str, Any]
MESSAGES = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
LONG: Body = {
    "max_tokens": 12,
    "system": [{"type": "text", "text": "s" * 40}],
    "messages": [{"role": "user", "content": "one two three four five six seven eight nine ten"}],
    "temperature": 0,
}


async def events(client: httpx.AsyncClient, **body: Any) -> list[Body]:
    """A stream's events; every one has a line with its name."""
    answer = await client.post(MESSAGES, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    out = []
    for block in blocks:
        name, data = block.split("\n")
        out.append(strict_json(data.removeprefix("data: ")))
        assert name == f"event: {out[-1]['type']}"
    return out


@pytest.mark.parametrize(
    ("body", "status", "kind", "named"),
    [
        ({"messages": HI}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0, "messages": HI}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 5, "messages": []}, 400, "invalid_request_error", "messages"),
        ({"max_tokens": 5, "messages": HI, "temperature": 9}, 400, "invalid_request_error", "temperature"),
        ({"max_tokens": 5, "messages": HI, "model": "nope"}, 404, "not_found_error", "nope"),
    ],
)
async def test_tc08_errors_have_one_shape(
    client: httpx.AsyncClient, body: Body, status: int, kind: str, named: str
) -> None:
    for stream in (False, True):
        got, answer = await post(client, MESSAGES, {**body, "stream": stream})
        assert got == status
        assert answer["type"] == "error"
        assert answer["error"]["type"] == kind
        assert named in answer["error"]["message"]


async def test_tc08_stop_sequences_are_told(client: httpx.AsyncClient) -> None:
    body: Body = {"max_tokens": 20, "messages": HI, "temperature": 0}
    _, free = await post(client, MESSAGES, body)
    text = free["content"][0]["text"]
    stop = text[3:6]
    _, stopped = await post(client, MESSAGES, {**body, "stop_sequences": [stop]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert stopped["content"][0]["text"] == text[: text.index(stop)]


async def test_tc08_order_and_counts(client: httpx.AsyncClient) -> None:
    seen = []
    for _ in range(2):
        told = await events(client, **LONG)
        names = [event["type"] for event in told]
        assert names[:3] == ["message_start", "content_block_start", "ping"]
        assert set(names[3:-3]) == {"content_block_delta"}
        assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert {event["index"] for event in told if "index" in event} == {0}
        assert told[-2]["delta"]["stop_reason"] == "max_tokens"
        seen.append(told[-2]["usage"])
    status, whole = await post(client, MESSAGES, LONG)
    assert status == 200
    text = "".join(event["delta"]["text"] for event in told if event["type"] == "content_block_delta")
    assert whole["content"] == [{"type": "text", "text": text}]
    counted = {key: value for key, value in LONG.items() if key not in ("max_tokens", "temperature")}
    num_prompt = (await post(client, f"{MESSAGES}/count_tokens", counted))[1]["input_tokens"]
    for usage in (*seen, whole["usage"]):
        assert sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_")) == num_prompt
        assert usage["output_tokens"] == 12
    assert seen[0]["cache_read_input_tokens"] == 0
    assert seen[1] == whole["usage"]
    assert seen[1]["cache_read_input_tokens"] >= 32


TOOL: Body = {
    "name": "f",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
async def test_tc08_tool_blocks(client: httpx.AsyncClient, choice: Body) -> None:
    """A forced call is a call, also from a model that knows none: pieces join to JSON that its schema allows."""
    body: Body = {"max_tokens": 80, "messages": [{"role": "user", "content": "weather"}], "tools": [TOOL]}
    body |= {"tool_choice": {**choice, "disable_parallel_tool_use": True}, "temperature": 0}
    told = await events(client, **body)
    starts = [event for event in told if event["type"] == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["tool_use"]
    assert [start["index"] for start in starts] == [0]
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    value = strict_json("".join(delta["partial_json"] for delta in deltas))
    assert set(value) == {"a"}
    assert isinstance(value["a"], int)
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
    _, whole = await post(client, MESSAGES, body)
    assert whole["content"][0]["input"] == value
    assert (whole["content"][0]["name"], whole["stop_reason"]) == ("f", "tool_use")
