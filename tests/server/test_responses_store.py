"""Kept responses: following conversations, background work, cancelling, deleting, bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeDelta, FakeLLM, Item, Submitted
from openai_client import client_of
from scripted import Scripted, call, text
from starlette.applications import Starlette

from octavo.config import ServerConfig
from octavo.errors import EngineDeadError
from octavo.server.app import make_app
from octavo.server.errors import ApiError
from octavo.server.events import TurnEnd
from octavo.server.responses.store import EventLog, Kept, ResponseStore


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(responses_store=4)


@pytest.fixture
def keeper(app: Starlette) -> openai.AsyncOpenAI:
    return client_of(app)


async def create(client: openai.AsyncOpenAI, **body: Any) -> Any:
    return await client.responses.create(**{"model": "tiny", "input": "hi", **body})


def held(release: asyncio.Event) -> Callable[[Submitted], list[Item]]:
    """One token, then a wait for `release`, then another."""

    def script(request: Submitted) -> list[Item]:
        last = FakeDelta(text="b", token_ids=[2], finish_reason="stop")
        return [[FakeDelta(text="a", token_ids=[1])], release, [last]]

    return script


async def ended(client: openai.AsyncOpenAI, name: str) -> Any:
    """The response, as soon as it runs no more."""
    for _ in range(1000):
        found = await client.responses.retrieve(name)
        if found.status not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0)
    raise AssertionError("the response never ended")


async def test_a_conversation_is_followed(keeper: openai.AsyncOpenAI, scripted: Scripted) -> None:
    scripted.say([*call(0, "f", "{}"), TurnEnd(0, "tool_calls")], text("done"), text("bye"))
    tool: Any = {"type": "function", "name": "f", "parameters": {}}
    first = await create(keeper, instructions="only once", tools=[tool])
    assert first.store
    result: Any = {"type": "function_call_output", "call_id": "call_0", "output": [{"type": "input_text", "text": "1"}]}
    second = await create(keeper, input=[result], previous_response_id=first.id)
    await create(keeper, input="and?", previous_response_id=second.id)
    roles = [(message["role"], message["content"]) for message in scripted.turns[2].request.messages]
    assert roles == [("user", "hi"), ("assistant", ""), ("tool", "1"), ("assistant", "done"), ("user", "and?")]
    found = await keeper.responses.retrieve(second.id)
    assert found.output_text == "done"
    assert found.previous_response_id == first.id
    listed = await keeper.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in listed.data] == ["message", "function_call", "function_call_output"]
    pages = [item.type async for item in keeper.responses.input_items.list(second.id, limit=1)]
    assert pages == ["function_call_output", "function_call", "message"]
    with pytest.raises(openai.BadRequestError, match="no response 'resp_0'") as missing:
        await create(keeper, previous_response_id="resp_0")
    assert missing.value.code == "previous_response_not_found"


async def test_input_is_counted_as_it_is_submitted(keeper: openai.AsyncOpenAI, llm: FakeLLM) -> None:
    tool: Any = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    first = await create(keeper, max_output_tokens=2)
    asked: Any = {"model": "tiny", "input": "x", "previous_response_id": first.id, "tools": [tool]}
    counted = await keeper.responses.input_tokens.count(**asked)
    assert len(llm.submitted) == 1
    await create(keeper, **asked)
    assert counted.input_tokens == len(llm.submitted[1].token_ids)


async def test_store_false_is_not_kept(keeper: openai.AsyncOpenAI) -> None:
    answer = await create(keeper, store=False)
    with pytest.raises(openai.NotFoundError):
        await keeper.responses.retrieve(answer.id)


async def test_streamed_responses_are_kept(keeper: openai.AsyncOpenAI) -> None:
    events = [event async for event in await create(keeper, stream=True, max_output_tokens=2)]
    found = await keeper.responses.retrieve(events[-1].response.id)
    assert found.output_text == "ab"
    with pytest.raises(openai.BadRequestError, match="background"):
        await keeper.responses.retrieve(found.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="background"):
        await keeper.responses.cancel(found.id)


async def test_delete(keeper: openai.AsyncOpenAI) -> None:
    answer = await create(keeper)
    await keeper.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        await keeper.responses.delete(answer.id)


async def test_background(keeper: openai.AsyncOpenAI, llm: FakeLLM) -> None:
    release = asyncio.Event()
    llm.script = held(release)
    accepted = await create(keeper, background=True)
    assert accepted.status == "queued"
    running = await keeper.responses.retrieve(accepted.id)
    assert running.status in ("queued", "in_progress")
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        await create(keeper, previous_response_id=accepted.id)
    release.set()
    done = await ended(keeper, accepted.id)
    assert (done.status, done.output_text) == ("completed", "ab")
    assert llm.streams[0].closed
    events = [event async for event in await keeper.responses.retrieve(accepted.id, stream=True)]
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].type == "response.completed"
    later = [e async for e in await keeper.responses.retrieve(accepted.id, stream=True, starting_after=4)]
    assert [event.sequence_number for event in later] == [event.sequence_number for event in events[5:]]
    for last in (events[-1].sequence_number, 10**6):  # a client that comes back and has missed nothing
        assert [e async for e in await keeper.responses.retrieve(accepted.id, stream=True, starting_after=last)] == []
    assert (await keeper.responses.cancel(accepted.id)).status == "completed"


async def test_background_stream_is_the_log(keeper: openai.AsyncOpenAI) -> None:
    events = [event async for event in await create(keeper, background=True, stream=True)]
    again = [event async for event in await keeper.responses.retrieve(events[0].response.id, stream=True)]
    assert events == again
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_cancel(keeper: openai.AsyncOpenAI, llm: FakeLLM) -> None:
    llm.script = held(asyncio.Event())
    accepted = await create(keeper, background=True)
    cancelled = await keeper.responses.cancel(accepted.id)
    assert cancelled.status == "cancelled"
    assert llm.streams[0].closed
    assert (await keeper.responses.retrieve(accepted.id)).status == "cancelled"


async def test_background_failures(keeper: openai.AsyncOpenAI, llm: FakeLLM) -> None:
    with pytest.raises(openai.BadRequestError, match="too long"):
        await create(keeper, background=True, input="x" * 300)
    llm.script = lambda request: [EngineDeadError("the engine ended")]
    accepted = await create(keeper, background=True)
    failed = await ended(keeper, accepted.id)
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", "server_error", "the engine ended")


async def test_the_server_drains_background_work(app: Starlette, keeper: openai.AsyncOpenAI, llm: FakeLLM) -> None:
    llm.script = held(asyncio.Event())
    accepted = await create(keeper, background=True)
    await asyncio.wait_for(_first_event(app, accepted.id), 5)
    assert await app.state.context.drain(0) == 1
    failed = await ended(keeper, accepted.id)
    assert "shut down" in failed.error.message


async def _first_event(app: Starlette, name: str) -> None:
    """Until the model has said something."""
    log = app.state.context.responses.get(name, "default").log
    async for events in log.follow(2):
        if "delta" in events:
            return


async def test_tenants_do_not_see_each_other(llm: FakeLLM, tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.a]\nkeys = ["ka"]\n[tenants.b]\nkeys = ["kb"]\n')
    app = make_app(llm, ServerConfig(responses_store=4, api_keys_file=str(keys)))  # type: ignore[arg-type]
    ours, theirs = client_of(app, "ka"), client_of(app, "kb")
    answer = await create(ours)
    assert (await ours.responses.retrieve(answer.id)).id == answer.id
    with pytest.raises(openai.NotFoundError):
        await theirs.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError):
        await create(theirs, previous_response_id=answer.id)


async def test_queries_are_checked(client: httpx.AsyncClient, keeper: openai.AsyncOpenAI) -> None:
    path = f"/v1/responses/{(await create(keeper)).id}/input_items"
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=msg_0"):
        answer = await client.get(f"{path}?{query}")
        assert answer.status_code == 400, query
        assert answer.json()["error"]["param"] == query.split("=")[0]


def kept(name: str, size: int = 0) -> Kept:
    return Kept({"id": name, "text": "x" * size}, [], "o")


async def test_bounds_of_the_store() -> None:
    store = ResponseStore(3, 1000)
    for name in "abcd":
        store.add(kept(name))
    with pytest.raises(ApiError):
        store.get("a", "o")
    store.add(kept("big", 960))
    assert len(store) == 1
    store.delete("big", "o")
    running = kept("run")
    running.task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
    store.add(running)
    for name in "efgh":
        store.add(kept(name))
    assert store.get("run", "o") is running
    full = ResponseStore(1, 1000)
    full.add(running)
    with pytest.raises(ApiError) as busy:
        full.add(kept("z"))
    assert busy.value.status == 429
    full.offer(kept("z"))
    assert len(full) == 1
    full.delete("run", "o")
    await asyncio.wait({running.task})
    assert running.task.cancelled()


async def test_followers_of_a_log() -> None:
    log = EventLog()
    log.add("a")

    async def read(after: int) -> str:
        return "".join([events async for events in log.follow(after)])

    readers = [asyncio.create_task(read(after)) for after in (-1, 0, 1)]
    await asyncio.sleep(0)
    log.add("b")
    log.add("c")
    log.close()
    assert await asyncio.gather(*readers) == ["abc", "bc", "c"]
    assert await read(5) == ""
