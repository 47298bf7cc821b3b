"""Calls of tools and reasoning: what users of other servers found broken. Names of tests begin with the cases' ids.

The parsers are driven directly with fixed text, cut everywhere; over HTTP a random model is made to call by grammars.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from octavo.server.parts import CallArguments, CallStart, Content, Part, Reasoning
from octavo.server.reasoning.table import reasoning_format
from octavo.server.stop_strings import StopStrings
from octavo.server.tools.base import Tools
from octavo.server.tools.table import tool_format
from tests.cases.calls import CHAT, post, stream
from tests.cases.tiny_chat_model import byte_of

Body = dict[str, Any]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Body] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
EVENING: Body = {"messages": [{"role": "user", "content": "Good evening."}], "tools": TOOLS, "max_tokens": 120}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = {"city": "Oslo", "note": 'he said "</tool_call>" {[ é🦙', "n": {"a": [1, {"b": None}]}}
TEXT = (
    'Sure. <tool_call>\n{"name":"get_weather","arguments":'
    + json.dumps(ARGUMENTS, separators=(",", ":"), ensure_ascii=False)
    + '}\n</tool_call>\n<tool_call>\n{"name":"now","arguments":{}}\n</tool_call>'
)


def hermes(pieces: list[str]) -> list[Part]:
    parser = tool_format("hermes").parser(Tools(TOOLS))
    return [part for piece in pieces for part in parser.feed(piece)] + parser.finish()


def joined(parts: list[Part]) -> tuple[str, list[list[str]]]:
    """Content, and each call as [name, arguments]."""
    content, calls = "", list[list[str]]()
    for part in parts:
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, CallStart):
            calls.append([part.name, ""])
        elif isinstance(part, CallArguments):
            calls[-1][1] += part.text
    return content, calls


def test_tc01_wherever_the_text_is_cut() -> None:
    content, calls = joined(hermes([TEXT]))
    assert content == "Sure."
    assert [name for name, _ in calls] == ["get_weather", "now"]
    assert [json.loads(arguments) for _, arguments in calls] == [ARGUMENTS, {}]
    for i in range(len(TEXT) + 1):
        assert joined(hermes([TEXT[:i], TEXT[i:]])) == (content, calls)
        for j in range(i, len(TEXT), 9):
            assert joined(hermes([TEXT[:i], TEXT[i:j], TEXT[j:]])) == (content, calls)
    assert joined(hermes(list(TEXT))) == (content, calls)


def check(choice: Body) -> list[Body]:
    """The calls of an answer that had to call: all right, unless it was cut."""
    calls: list[Body] = choice["message"].get("tool_calls") or []
    assert (choice["finish_reason"] == "tool_calls") is (bool(calls) and choice["finish_reason"] != "length")
    if choice["finish_reason"] != "length":
        assert calls
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "get_weather":
                assert arguments["city"] in ("Oslo", "Rome")
                assert arguments["days"] in (1, 2, 3)
                assert len(arguments) == 2
    return calls


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_tc02_a_choice_is_enforced(client: httpx.AsyncClient, choice: Any, temperature: float) -> None:
    body = {**EVENING, "tool_choice": choice, "temperature": temperature, "seed": 4}
    status, answer = await post(client, CHAT, body)
    assert status == 200, answer
    calls = check(answer["choices"][0])
    if choice is NAMED:
        assert [call["function"]["name"] for call in calls] == ["get_weather"]
    streamed = (await stream(client, CHAT, **body)).of(0)
    deltas = [call for part in streamed for call in part["delta"].get("tool_calls", [])]
    for i, call in enumerate(calls):
        mine = [delta for delta in deltas if delta["index"] == i]
        assert mine[0]["function"]["name"] == call["function"]["name"]
        assert "".join(delta["function"]["arguments"] for delta in mine) == call["function"]["arguments"]
        assert all("id" not in delta and "name" not in delta["function"] for delta in mine[1:])
    assert streamed[-1]["finish_reason"] == answer["choices"][0]["finish_reason"]


async def test_tc02_none_and_refusals(client: httpx.AsyncClient) -> None:
    status, answer = await post(client, CHAT, {**EVENING, "tool_choice": "none", "max_tokens": 12})
    assert status == 200
    assert "tool_calls" not in answer["choices"][0]["message"]
    plain: Body = {"messages": EVENING["messages"], "max_tokens": 4}
    assert (await post(client, CHAT, {**plain, "tool_choice": "none"}))[0] == 200
    nope = {"type": "function", "function": {"name": "nope"}}
    for body in ({**plain, "tool_choice": "required"}, {**EVENING, "tool_choice": nope}):
        status, answer = await post(client, CHAT, body)
        assert status == 400
        assert answer["error"]["param"] == "tool_choice"


async def test_tc02_one_call_at_most(client: httpx.AsyncClient) -> None:
    body = {**EVENING, "tool_choice": "required", "parallel_tool_calls": False, "n": 4, "temperature": 1, "seed": 2}
    status, answer = await post(client, CHAT, body)
    assert status == 200
    assert [len(check(choice)) for choice in answer["choices"]] == [1] * 4


async def test_sa01_choices_that_may_end_alone_draw_as_others(client: httpx.AsyncClient) -> None:
    """Stop strings and one call at most are matched by the server, choice by choice: nothing else may change."""
    body: Body = {**EVENING, "n": 3, "temperature": 1, "seed": 5, "max_tokens": 20}
    together, alone, single = [
        [choice["message"]["content"] for choice in (await post(client, CHAT, {**body, **more}))[1]["choices"]]
        for more in ({}, {"stop": ["~~ never ~~"]}, {"parallel_tool_calls": False})
    ]
    assert together == alone == single
    assert len(set(together)) == 3


@pytest.mark.parametrize("content", [None, "missing", [], "", [{"type": "text", "text": "Let me look."}]])
@pytest.mark.parametrize("result", ["18 degrees", [{"type": "text", "text": "18 degrees"}]])
async def test_tc04_the_second_turn(client: httpx.AsyncClient, content: Any, result: Any) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city":"Oslo","days":1}'},
    }
    assistant = {"role": "assistant", "tool_calls": [call, {**call, "id": "c2"}], "content": content}
    if content == "missing":
        del assistant["content"]
    results = [{"role": "tool", "tool_call_id": name, "content": result} for name in ("c1", "c2")]
    messages = [{"role": "user", "content": "8C?"}, assistant, *results]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 8, "return_token_ids": True}
    status, answer = await post(client, CHAT, body)
    assert status == 200, answer
    prompt = bytes(map(byte_of, [i for i in answer["prompt_token_ids"] if i < 256])).decode()
    assert "None" not in prompt
    assert prompt.count("18 degrees") == 2


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('Hi <tool_call>{"name":"get_wea', "Hi ", []),
        ('<tool_call>{"name":"x","arguments":{"a":1}', "", [["x", '{"a":1']]),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ("a < b and <tool> is text", "a < b and <tool> is text", []),
        ("</tool_call> stray", "</tool_call> stray", []),
    ],
)
def test_tc05_cut_and_malformed_calls(text: str, content: str, calls: list[list[str]]) -> None:
    """Cut before its name a call is left out; cut later it does not look complete; what is no call is content."""
    assert joined(hermes([text])) == (content, calls)
    assert joined(hermes(list(text))) == (content, calls)


async def test_tc05_a_call_cut_by_the_limit(client: httpx.AsyncClient) -> None:
    streamed = await stream(client, CHAT, **{**EVENING, "tool_choice": "required", "max_tokens": 6})
    assert streamed.text() == ""
    assert streamed.of(0)[-1]["finish_reason"] == "length"
    assert not any(part["delta"].get("tool_calls") for part in streamed.of(0))


def test_tc07_stop_strings_in_reasoning() -> None:
    """They count in content only, and no piece of a tag shows, at any split."""
    text = "is 7.25 or 7.5 more, clear</think>The larger is 7.50 END tail"
    for cut in range(len(text) + 1):
        for pieces in ([text[:cut], text[cut:]], [*text[:cut], text[cut:]]):
            parser = reasoning_format("qwen3").parser(True)
            stop = StopStrings(["7.5", "END"], keep=False)
            parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
            reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
            content = "".join(stop.feed(part.text, counts=True) for part in parts if isinstance(part, Content))
            assert (reasoning, content, stop.found) == ("is 7.25 or 7.5 more, clear", "The larger is ", "7.5")
