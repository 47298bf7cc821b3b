"""Server-sent events: exact framing, roles, usage, errors in the middle, clients that leave."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest
from asgi_call import AsgiCall, events
from fake_engine import FakeDelta, FakeLLM, Item, Submitted
from starlette.applications import Starlette

from octavo.errors import EngineDeadError
from octavo.server.context import ServerContext

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


async def stream(client: httpx.AsyncClient, path: str = CHAT, **body: Any) -> list[Any]:
    base = {"messages": HI} if path == CHAT else {}
    answer = await client.post(path, json={**base, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(answer.content)


async def test_chat_chunks(client: httpx.AsyncClient) -> None:
    *chunks, done = await stream(client, max_tokens=3)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {"content": "c"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, None, "length"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_completion_chunks(client: httpx.AsyncClient) -> None:
    *chunks, done = await stream(client, TEXT, prompt="x", max_tokens=2, echo=True)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["x", "a", "b", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_n_choices_open_and_close_once(client: httpx.AsyncClient) -> None:
    *chunks, _ = await stream(client, n=3, max_tokens=4)
    roles: Counter[int] = Counter()
    ends: Counter[int] = Counter()
    texts: Counter[int] = Counter()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        if "role" in choice["delta"]:
            assert texts[index] == 0
            roles[index] += 1
        elif choice["finish_reason"] is not None:
            ends[index] += 1
        else:
            assert ends[index] == 0
            texts[index] += 1
    assert roles == ends == {0: 1, 1: 1, 2: 1}
    assert texts == {0: 4, 1: 4, 2: 4}


async def test_many_prompts_keep_their_choices(client: httpx.AsyncClient) -> None:
    *chunks, _ = await stream(client, TEXT, prompt=["A", "B"], n=2, echo=True, max_tokens=2)
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["Aab", "Aab", "Bab", "Bab"]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_no_usage_unless_asked(client: httpx.AsyncClient, options: Any) -> None:
    *chunks, _ = await stream(client, stream_options=options)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_usage_comes_last(client: httpx.AsyncClient) -> None:
    *chunks, last, _ = await stream(client, max_tokens=3, stream_options={"include_usage": True})
    assert all("usage" not in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    whole = await client.post(CHAT, json={"messages": HI, "max_tokens": 3})
    assert whole.json()["usage"] == last["usage"]


async def test_continuous_usage_never_falls(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = await stream(client, max_tokens=3, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3


NASTY = 'l1\nl2\r\nl3\u2028l4 "q" data: x \\ é 日本 🌶\x00\x7f'


async def test_text_is_escaped_so_that_every_event_is_one_line(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = lambda request: [[FakeDelta(text=NASTY, token_ids=[1], finish_reason="stop")]]
    chunks = await stream(client)
    assert chunks[1]["choices"][0]["delta"]["content"] == NASTY


async def test_held_back_text_makes_no_empty_chunk(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = lambda request: [
        [FakeDelta(token_ids=[1])],
        [FakeDelta(token_ids=[2])],
        [FakeDelta(text="🌶", token_ids=[3], finish_reason="stop", stop_reason="x")],
    ]
    *chunks, _ = await stream(client)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "🌶", None]
    assert chunks[-1]["choices"][0]["stop_reason"] == "x"


async def test_a_slow_reader_gets_merged_text(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = lambda request: [
        [FakeDelta(index=i % 2, text=str(i), token_ids=[i]) for i in range(6)],
        [FakeDelta(index=i, finish_reason="length") for i in range(2)],
    ]
    *chunks, usage, _ = await stream(client, n=2, stream_options={"include_usage": True})
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert contents == ["", "024", "", "135", None, None]
    assert usage["usage"]["completion_tokens"] == 6


async def test_logprobs_and_ids_in_chunks(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    def script(request: Submitted) -> list[Item]:
        return [
            [FakeDelta(text="a", token_ids=[64], logprobs=[(1, [(64, -0.5), (64, -0.5)])])],
            [FakeDelta(text="b", token_ids=[65], logprobs=[(1, [(65, -0.25), (65, -0.25)])], finish_reason="stop")],
        ]

    llm.script = script
    *chunks, _ = await stream(client, logprobs=True, top_logprobs=1, return_token_ids=True)
    entries = [chunk["choices"][0]["logprobs"]["content"][0] for chunk in chunks[1:3]]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks[1:3]] == [[64], [65]]
    *chunks, _ = await stream(client, TEXT, prompt="x", logprobs=1)
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:2]]
    assert offsets == [[0], [1]]


async def test_an_error_in_the_middle_is_one_event_and_the_end(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = lambda request: [[FakeDelta(text="a", token_ids=[1])], EngineDeadError("the engine ended")]
    *chunks, last = await stream(client)
    assert last == {
        "error": {
            "message": "the engine ended",
            "type": "service_unavailable",
            "param": None,
            "code": "engine_dead",
        }
    }
    assert all("error" not in chunk for chunk in chunks)
    assert llm.streams[0].closed


async def test_a_client_that_leaves_a_stream_ends_the_request(app: Starlette, llm: FakeLLM) -> None:
    llm.script = lambda request: [[FakeDelta(text="a", token_ids=[1])], asyncio.Event()]
    call = AsgiCall(app, CHAT, {"messages": HI, "stream": True})
    assert (await call.next())["type"] == "http.response.start"
    assert b'"content":"a"' in (await call.next())["body"]
    call.disconnect()
    await asyncio.wait_for(call.task, 5)
    assert llm.streams[0].closed
    context = app.state.context
    assert isinstance(context, ServerContext)
    assert not context.live.calls


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_client_that_leaves_a_plain_call_ends_the_request(app: Starlette, llm: FakeLLM, path: str) -> None:
    started = asyncio.Event()

    def script(request: Submitted) -> list[Item]:
        started.set()
        return [asyncio.Event()]

    llm.script = script
    call = AsgiCall(app, path, {"messages": HI} if path == CHAT else {"prompt": ["x", "y"]})
    await started.wait()
    call.disconnect()
    await asyncio.wait_for(call.task, 5)
    assert llm.streams
    assert all(stream.closed for stream in llm.streams)


async def test_drain_lets_calls_finish(app: Starlette, llm: FakeLLM, client: httpx.AsyncClient) -> None:
    go_on = asyncio.Event()
    llm.script = lambda request: [
        [FakeDelta(text="a", token_ids=[1])],
        go_on,
        [FakeDelta(text="b", token_ids=[2], finish_reason="stop")],
    ]
    call = AsgiCall(app, CHAT, {"messages": HI, "stream": True})
    await call.next()
    draining = asyncio.create_task(app.state.context.drain(5))
    await asyncio.sleep(0)
    refused = await client.post(CHAT, json={"messages": HI})
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert (await client.get("/ready")).status_code == 503
    go_on.set()
    body = await call.rest()
    assert events(body)[-1] == "[DONE]"
    assert await draining == 0


async def test_drain_cuts_what_is_left_with_an_error(app: Starlette, llm: FakeLLM) -> None:
    llm.script = lambda request: [[FakeDelta(text="a", token_ids=[1])], asyncio.Event()]
    streamed = AsgiCall(app, CHAT, {"messages": HI, "stream": True})
    await streamed.next()
    llm.script = lambda request: [asyncio.Event()]
    plain = AsgiCall(app, CHAT, {"messages": HI})
    while len(llm.streams) < 2:
        await asyncio.sleep(0)
    assert await app.state.context.drain(0) == 2
    last = events(await streamed.rest())[-1]
    assert last["error"]["type"] == "service_unavailable"
    assert (await plain.next())["status"] == 503
    assert all(made.closed for made in llm.streams)
