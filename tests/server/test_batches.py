"""/v1/files and /v1/batches through OpenAI's own client: the whole life of a batch, restarts and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeDelta, FakeLLM, Item, Submitted
from openai_client import client_of
from starlette.applications import Starlette

from octavo.config import ServerConfig
from octavo.errors import ConfigError, EngineDeadError, OverloadError
from octavo.server.app import make_app
from octavo.server.batch.room import Room
from octavo.server.batch.service import Batches

CHAT = "/v1/chat/completions"
Made = Callable[..., Starlette]


def close(app: Starlette) -> None:
    app.state.batches.close()
    app.state.context.close()


@pytest.fixture
def make(tmp_path: Path, llm: FakeLLM) -> Iterator[Made]:
    """Makes apps over one folder; the one before is closed first, as by the end of its process."""
    apps: list[Starlette] = []

    def made(**options: Any) -> Starlette:
        if apps:
            close(apps[-1])
        config = ServerConfig(batch_dir=str(tmp_path / "batches"), **options)
        apps.append(make_app(llm, config))  # type: ignore[arg-type]
        return apps[-1]

    yield made
    if apps:
        close(apps[-1])


def line(custom_id: str, url: str = CHAT, **body: Any) -> str:
    body = body or {"messages": [{"role": "user", "content": custom_id}], "max_tokens": 2}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


async def upload(client: openai.AsyncOpenAI, *lines: str) -> Any:
    return await client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")


async def start(client: openai.AsyncOpenAI, *lines: str, endpoint: Any = CHAT, **more: Any) -> Any:
    file = await upload(client, *lines)
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def until(client: openai.AsyncOpenAI, name: str, done: Callable[[Any], bool]) -> Any:
    """The batch, as soon as it is so."""
    async with asyncio.timeout(20):
        while not done(batch := await client.batches.retrieve(name)):
            await asyncio.sleep(0)
    return batch


def has_ended(batch: Any) -> bool:
    return batch.status in ("completed", "failed", "cancelled", "expired")


async def lines_of(client: openai.AsyncOpenAI, name: str | None) -> list[Any]:
    assert name is not None
    content = await client.files.content(name)
    return [json.loads(each) for each in content.text.splitlines()]


def held(number: int, gate: asyncio.Event) -> Callable[[Submitted], list[Item]]:
    """Answers `number` requests at once and the others after `gate`."""
    count = 0

    def script(request: Submitted) -> list[Item]:
        nonlocal count
        count += 1
        last: list[Item] = [[FakeDelta(text="ok", token_ids=[1, 2], finish_reason="stop", num_cached_tokens=4)]]
        return last if count <= number else [gate, *last]

    return script


async def test_a_batch(make: Made, llm: FakeLLM) -> None:
    client = client_of(make())
    lines = [line(f"r{i}") for i in range(300)]
    lines.insert(7, line("bad", messages=[], max_tokens=2))
    batch = await start(client, *lines, "", metadata={"a": "b"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"a": "b"})
    assert batch.expires_at - batch.created_at == 24 * 3600
    done = await until(client, batch.id, has_ended)
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"completed": 300, "failed": 1, "total": 301}
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    outputs = await lines_of(client, done.output_file_id)
    assert [each["custom_id"] for each in outputs] == [f"r{i}" for i in range(300)]
    first = outputs[0]
    assert set(first) == {"id", "custom_id", "response", "error"}
    assert (first["response"]["status_code"], first["error"]) == (200, None)
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "ab"
    (error,) = await lines_of(client, done.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    assert "must not be empty" in error["response"]["body"]["error"]["message"]
    usages = [each["response"]["body"]["usage"] for each in outputs]
    assert done.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)
    assert done.usage.output_tokens == 600
    assert {request.terms.priority for request in llm.submitted} == {1000}
    assert all(stream.closed for stream in llm.streams)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [("/v1/completions", {"prompt": "x", "max_tokens": 2}), ("/v1/responses", {"input": "x", "max_output_tokens": 2})],
)
async def test_other_endpoints(make: Made, endpoint: str, body: Any) -> None:
    client = client_of(make())
    batch = await start(client, line("a", endpoint, **body), endpoint=endpoint)
    done = await until(client, batch.id, has_ended)
    (output,) = await lines_of(client, done.output_file_id)
    assert output["response"]["body"]["model"] == "tiny"
    assert done.usage.output_tokens == 2


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([], "empty_file", None),
        (["", "  "], "empty_file", None),
        ([line("a"), "{"], "invalid_json_line", 2),
        (["[1]"], "invalid_json_line", 1),
        ([line("a"), "", line("a")], "duplicate_custom_id", 3),
        ([line("")], "invalid_custom_id", 1),
        ([line("a", "/v1/completions")], "mismatched_url", 1),
        ([line("a").replace("POST", "GET")], "invalid_method", 1),
        ([json.dumps({"custom_id": "a", "method": "POST", "url": CHAT})], "missing_body", 1),
        ([line("a", messages=[], stream=True)], "unsupported_field", 1),
        ([line(f"{i}") for i in range(4)], "too_many_requests", 4),
        ([line("a", messages=[{"role": "user", "content": "x" * 3000}])], "line_too_long", 1),
    ],
)
async def test_files_that_can_not_be_run(make: Made, lines: list[str], code: str, number: int | None) -> None:
    client = client_of(make(batch_max_requests=3, max_body_bytes=2048))
    batch = await start(client, *lines)
    failed = await until(client, batch.id, has_ended)
    assert failed.status == "failed"
    assert failed.failed_at
    assert failed.errors.data[0].code == code
    assert failed.errors.data[0].line == number
    assert failed.request_counts.total == 0
    assert failed.output_file_id is None


async def test_a_restart_in_the_middle(make: Made, llm: FakeLLM) -> None:
    client = client_of(make(batch_concurrency=2))
    llm.script = held(5, asyncio.Event())
    batch = await start(client, *(line(f"r{i}") for i in range(20)))
    await until(client, batch.id, lambda found: found.request_counts.completed == 5)
    app = make()
    client = client_of(app)
    found = await client.batches.retrieve(batch.id)
    assert (found.status, found.request_counts.completed) == ("in_progress", 5)
    llm.script = held(20, asyncio.Event())
    llm.submitted.clear()
    await app.state.batches.runner.resume()
    done = await until(client, batch.id, has_ended)
    assert done.request_counts.model_dump() == {"completed": 20, "failed": 0, "total": 20}
    assert len(llm.submitted) == 15
    assert [each["custom_id"] for each in await lines_of(client, done.output_file_id)] == [f"r{i}" for i in range(20)]


async def test_cancel(make: Made, llm: FakeLLM) -> None:
    app = make(batch_concurrency=2)
    client = client_of(app)
    llm.script = held(3, asyncio.Event())
    batch = await start(client, *(line(f"r{i}") for i in range(6)))
    await until(client, batch.id, lambda found: found.request_counts.completed == 3)
    asked = await client.batches.cancel(batch.id)
    assert asked.status == "cancelling"
    done = await until(client, batch.id, has_ended)
    assert (done.status, done.request_counts.completed) == ("cancelled", 3)
    assert done.cancelling_at <= done.cancelled_at
    assert len(await lines_of(client, done.output_file_id)) == 3
    errors = await lines_of(client, done.error_file_id)
    assert [each["error"]["code"] for each in errors] == ["batch_cancelled"] * 3
    assert all(stream.closed for stream in llm.streams)
    with pytest.raises(openai.ConflictError, match="cancelled already"):
        await client.batches.cancel(batch.id)


async def test_expiry(make: Made, llm: FakeLLM, tmp_path: Path) -> None:
    app = make()
    context = app.state.context
    inner, endpoints = app.state.batches.app, app.state.batches.endpoints
    app.state.batches.close()
    now = [1000.0]
    app.state.batches = Batches(context, tmp_path / "batches", inner, endpoints, clock=lambda: now[0])
    client = client_of(app)
    llm.script = held(1, asyncio.Event())
    batch = await start(client, line("a"), line("b"))
    await until(client, batch.id, lambda found: found.request_counts.completed == 1)
    now[0] += 25 * 3600
    app.state.batches.runner.close()
    await asyncio.sleep(0)
    await app.state.batches.runner.resume()
    done = await until(client, batch.id, has_ended)
    assert done.status == "expired"
    (output,) = await lines_of(client, done.output_file_id)
    (error,) = await lines_of(client, done.error_file_id)
    assert {output["custom_id"], error["custom_id"]} == {"a", "b"}
    assert error["error"]["code"] == "batch_expired"
    now[0] += 31 * 24 * 3600
    assert [file async for file in client.files.list()] == []


async def test_what_may_be_tried_again_is(make: Made, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    refusals: list[Item] = [OverloadError("full", 1), EngineDeadError("it ended")]
    llm.script = lambda request: [refusals.pop()] if refusals else [[FakeDelta(text="a", finish_reason="stop")]]
    client = client_of(make())
    batch = await start(client, line("a"))
    with monkeypatch.context() as patched:
        patched.setattr("octavo.server.batch.runner.asyncio.sleep", sleep)
        patched.setattr("octavo.server.overload.MEMORY_S", 0.0)  # here it does not pass
        async with asyncio.timeout(10):
            while not has_ended(await client.batches.retrieve(batch.id)):
                pass
    assert [wait for wait in waits if wait] == [1.0, 2.0]
    assert (await client.batches.retrieve(batch.id)).request_counts.completed == 1


async def test_a_mistake_of_the_server_fails_its_request_alone(make: Made, llm: FakeLLM) -> None:
    mistakes: list[Item] = [KeyError("mistake")]
    llm.script = lambda request: [mistakes.pop()] if mistakes else [[FakeDelta(text="a", finish_reason="stop")]]
    client = client_of(make())
    batch = await start(client, *(line(f"r{i}") for i in range(20)))
    done = await until(client, batch.id, has_ended)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 19, 1)
    (error,) = await lines_of(client, done.error_file_id)
    assert error["response"]["status_code"] == 500
    assert error["response"]["body"]["error"]["code"] == "internal_error"


async def test_batches_leave_room(make: Made, llm: FakeLLM) -> None:
    app = make(batch_concurrency=100)
    context = app.state.context
    room = Room(context, 100)
    for _ in range(6):  # three quarters of 8 slots
        await room.enter()
    waiting = asyncio.create_task(room.enter())
    await asyncio.sleep(0)
    assert not waiting.done()
    room.leave()
    await waiting
    room.leave()
    context.live.calls.update(object() for _ in range(8))  # 5 of these are the room's, 3 are others'
    late = asyncio.create_task(room.enter())
    await asyncio.sleep(0)
    assert not late.done()
    context.live.calls.clear()
    room.leave()
    await late
    llm.state = "restarting"
    shut = asyncio.create_task(room.enter())
    await asyncio.sleep(0)
    assert not shut.done()
    shut.cancel()


async def test_lists_and_files(make: Made) -> None:
    client = client_of(make())
    files = [await upload(client, line(f"{i}")) for i in range(3)]
    assert files[0].model_dump(include={"object", "filename", "purpose", "status"}) == {
        "object": "file",
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    assert files[0].expires_at - files[0].created_at == 30 * 24 * 3600
    pages = [file.id async for file in client.files.list(limit=2, order="asc")]
    assert pages == [file.id for file in files]
    assert [file.id async for file in client.files.list(purpose="batch_output")] == []
    assert (await client.files.content(files[1].id)).text == line("1")
    assert (await client.files.retrieve(files[1].id)).bytes == len(line("1"))
    assert (await client.files.delete(files[1].id)).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(files[1].id)
    batches = [await start(client, line(f"{i}")) for i in range(3)]
    assert [batch.id async for batch in client.batches.list(limit=2)] == [batch.id for batch in batches[::-1]]
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_0")
    for batch in batches:
        await until(client, batch.id, has_ended)


async def test_a_large_file_comes_back_whole(make: Made) -> None:
    client = client_of(make())
    data = b"".join(b"%d\n" % i for i in range(400_000))
    file = await client.files.create(file=("big", data), purpose="batch")
    assert (await client.files.content(file.id)).content == data


async def test_tenants_do_not_see_each_other(make: Made, tmp_path: Path, llm: FakeLLM) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.a]\nkeys = ["ka"]\n[tenants.b]\nkeys = ["kb"]\n')
    app = make(api_keys_file=str(keys))
    ours, theirs = client_of(app, "ka"), client_of(app, "kb")
    batch = await start(ours, line("x"))
    done = await until(ours, batch.id, has_ended)
    assert len(await lines_of(ours, done.output_file_id)) == 1
    assert app.state.context.keyring.tenants["a"].usage.num_output_tokens == 2
    assert [file async for file in theirs.files.list()] == []
    assert [found async for found in theirs.batches.list()] == []
    for name in (batch.input_file_id, done.output_file_id):
        with pytest.raises(openai.NotFoundError):
            await theirs.files.content(name)
    with pytest.raises(openai.NotFoundError):
        await theirs.batches.cancel(batch.id)
    with pytest.raises(openai.BadRequestError, match="no file"):
        await theirs.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_file_id": "file-0"}, "no file"),
        ({"input_file_id": None}, "input_file_id is required"),
        ({"endpoint": "/v1/moderations"}, "endpoint must be one of"),
        ({"endpoint": "/admin/drain"}, "endpoint must be one of"),
        ({"completion_window": "1y"}, "completion_window"),
        ({"completion_window": "99999d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "seconds must be between"),
        ({"output_expires_after": {"anchor": "now", "seconds": 5000}}, "anchor"),
    ],
)
async def test_bad_batches(make: Made, body: Any, message: str) -> None:
    transport = httpx.ASGITransport(app=make())
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        whole = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h", **body}
        answer = await client.post("/v1/batches", json=whole)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


async def test_bad_uploads(make: Made) -> None:
    transport = httpx.ASGITransport(app=make(batch_max_file_bytes=200_000, batch_storage_bytes=150_000))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:

        async def post(status: int, **form: Any) -> str:
            answer = await client.post("/v1/files", **form)
            assert answer.status_code == status, answer.text
            message: str = answer.json()["error"]["message"]
            return message

        file = {"file": ("a", b"x")}
        assert "multipart" in await post(415, json={})
        assert "multipart" in await post(400, content=b"x", headers={"content-type": "multipart/form-data"})
        assert "file is required" in await post(400, data={"purpose": "batch"}, files={"other": b"x"})
        assert "purpose" in await post(400, files=file)
        assert "purpose" in await post(400, files=file, data={"purpose": "vision"})
        anchor = {"purpose": "batch", "expires_after[anchor]": "created_at"}
        assert "seconds" in await post(400, files=file, data=anchor)
        assert "between" in await post(400, files=file, data={**anchor, "expires_after[seconds]": "5"})
        large = {"file": ("a", b"x" * 300_000)}
        assert "--batch-max-file-bytes" in await post(413, files=large, data={"purpose": "batch"})
        full = {"file": ("a", b"x" * 160_000)}
        assert "--batch-storage-bytes" in await post(413, files=full, data={"purpose": "batch"})
        for path in ("/v1/files?limit=0", "/v1/files?order=up", "/v1/batches?limit=101"):
            assert (await client.get(path)).status_code == 400
        assert (await client.get("/v1/files?after=file-0")).status_code == 404


async def test_off_by_default(client: httpx.AsyncClient) -> None:
    for path in ("/v1/files", "/v1/batches"):
        answer = await client.get(path)
        assert answer.status_code == 404
        assert "--batch-dir" in answer.json()["error"]["message"]


def test_one_server_a_folder(make: Made, llm: FakeLLM, tmp_path: Path) -> None:
    app = make()
    with pytest.raises(ConfigError, match="used by another server"):
        make_app(llm, app.state.context.config)  # type: ignore[arg-type]
    for bad in (tmp_path / "file", tmp_path / "broken"):
        if bad.name == "file":
            bad.write_text("x")
        else:
            bad.mkdir()
            (bad / "batches.sqlite3").write_bytes(b"no database" * 100)
        with pytest.raises(ConfigError, match="--batch-dir"):
            make_app(llm, ServerConfig(batch_dir=str(bad)))  # type: ignore[arg-type]
