"""The serving process: the official client, disconnects, oversized input, signals, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from serving import START, ServerProcess, fake_model

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_model(model_folder, tmp_path_factory.mktemp("model"))


def serve(model: Path, *arguments: str) -> ServerProcess:
    return ServerProcess("--model", str(model), "--runner", "fake", "--served-model-name", "tiny", *arguments)


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with serve(model, "--fake-step-ms", "2") as server:
        yield server.wait_ready()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def metric(url: str, name: str) -> float:
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(f"octavo:{name}{{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no metric {name}")


def test_openai_client_plain(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = client.chat.completions.create(model="tiny", messages=HI, max_tokens=8, n=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    completion = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4, logprobs=2, echo=True)
    assert [choice.text[0] for choice in completion.choices] == ["a", "b"]
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 5


def test_openai_client_streams_what_it_answers(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 40, "seed": 3}
    whole = client.chat.completions.create(**common)
    text = ""
    usage = None
    for chunk in client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert text == whole.choices[0].message.content
    assert usage == whole.usage
    pieces = client.completions.create(model="tiny", prompt="a", max_tokens=12, stream=True)
    joined = "".join(piece.choices[0].text for piece in pieces)
    assert joined == client.completions.create(model="tiny", prompt="a", max_tokens=12).choices[0].text


def test_openai_client_logprobs(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=5, logprobs=True, top_logprobs=2, stream=True
    )
    entries = [
        entry
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    assert len(entries) == 5
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_openai_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt=[5] * 600)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as asked:
        client.completions.create(model="tiny", prompt="x", max_tokens=10_000)
    assert asked.value.param == "max_tokens"


async def test_async_openai_client_in_parallel(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

        async def one(i: int) -> str:
            stream = await client.completions.create(model="tiny", prompt=f"p{i % 4}", max_tokens=20, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(one(i) for i in range(32)))
        assert all(texts[i] == texts[i % 4] for i in range(32))
        assert len(set(texts)) == 4


def test_cached_tokens_are_told_and_salts_keep_apart(client: openai.OpenAI) -> None:
    def cached(salt: str | None) -> int | None:
        body = {"cache_salt": salt}
        answer = client.completions.create(model="tiny", prompt=[77] * 80, max_tokens=1, extra_body=body)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(salt) for salt in ("a", "a", "b", None, None)] == [0, 64, 0, 0, 64]


async def test_a_full_queue_refuses_with_retry_after(model: Path) -> None:
    with serve(model, "--fake-step-ms", "20", "--max-num-seqs", "1", "--max-queued-requests", "4") as server:
        async with httpx.AsyncClient(base_url=server.wait_ready(), timeout=60) as client:
            bodies = [{"prompt": f"p{i}", "max_tokens": 20, "stream": i % 2 == 0} for i in range(50)]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 4
    refused = answers[statuses.index(429)]
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_call_that_waits_too_long_is_refused(model: Path, streamed: bool) -> None:
    with serve(model, "--fake-step-ms", "20", "--max-num-seqs", "1", "--max-queue-s", "0.1") as server:
        url = server.wait_ready()
        running = stream_lines(url, max_tokens=40)
        next(running)
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "y", "stream": streamed}, timeout=30)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "deadline"
        assert int(refused.headers["retry-after"]) >= 1
        assert list(running)[-1] == "data: [DONE]"


@pytest.mark.parametrize("streamed", [True, False])
async def test_disconnect_frees_blocks(url: str, streamed: bool) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": streamed}).encode()
    parts = urlsplit(url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    aborted = metric(url, "requests_aborted_total")
    pairs = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(4)]
    for _, writer in pairs:
        writer.write(head.encode() + b"\r\n\r\n" + body)
    if streamed:
        for reader, _ in pairs:
            await reader.readuntil(b"data: ")
    else:
        while metric(url, "num_requests_running") < 4:
            await asyncio.sleep(0)
    for _, writer in pairs:
        writer.close()
    while metric(url, "requests_aborted_total") < aborted + 4:
        await asyncio.sleep(0)
    assert metric(url, "num_requests_running") == 0
    assert metric(url, "kv_cache_usage_perc") == 0


async def test_huge_bodies_and_headers(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        answer = await client.post(
            "/v1/completions", content=b"x" * (100 << 20), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413
        assert (await client.get("/health")).status_code == 200
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (1 << 20))
    assert (await reader.readline()).startswith(b"HTTP/1.1 431")
    writer.close()


def test_port_in_use_is_one_line(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with serve(model, "--port", port) as server:
            code, log = server.end()
    assert code == 2
    assert log.count("\n") == 1
    assert "--port" in log


HELD = """
from octavo.engine import spawn
spawn.BOOT = "open({path!r}).read();" + spawn.BOOT
"""
"""The engine begins when somebody has opened the pipe at `path` and closed it."""


def test_ready_answers_while_the_model_loads(model: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    arguments = "--model", str(model), "--runner", "fake"
    with ServerProcess(*arguments, start=HELD.format(path=str(pipe)) + START) as server:
        assert server.process.stderr is not None
        found = re.search(r"http://\S+", server.process.stderr.readline())
        assert found
        answer = httpx.get(f"{found.group()}/ready")
        assert answer.status_code == 503
        assert answer.json()["status"] == "starting"
        assert httpx.get(f"{found.group()}/health").status_code == 503
        pipe.write_text("")
        server.wait_ready()
        assert httpx.get(f"{found.group()}/ready").status_code == 200


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    with ServerProcess("--model", str(tmp_path / "nowhere")) as server:
        code, log = server.end()
    assert code == 2
    assert "nowhere" in log.splitlines()[-1]
    assert "Traceback" not in log


def stream_lines(url: str, **body: Any) -> Iterator[str]:
    """Lines of a stream, as they come."""
    everything = {"prompt": "x", "stream": True, "ignore_eos": True, **body}
    with httpx.stream("POST", f"{url}/v1/completions", json=everything, timeout=30) as answer:
        assert answer.status_code == 200
        yield from (line for line in answer.iter_lines() if line)


def test_sigterm_lets_calls_finish(model: Path) -> None:
    with serve(model, "--fake-step-ms", "5") as server:
        url = server.wait_ready()
        lines = stream_lines(url, max_tokens=100)
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        while (refused := httpx.post(f"{url}/v1/completions", json={"prompt": "y"})).status_code == 200:
            pass
        assert refused.status_code == 503
        assert list(lines)[-1] == "data: [DONE]"
        code, log = server.end()
    assert code == 0
    assert "cut" not in log


def test_sigterm_cuts_what_is_left(model: Path) -> None:
    with serve(model, "--fake-step-ms", "20", "--drain-timeout-s", "0.2") as server:
        lines = stream_lines(server.wait_ready(), max_tokens=500)
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        last = json.loads(list(lines)[-1].removeprefix("data: "))
        assert last["error"]["type"] == "service_unavailable"
        code, log = server.end()
    assert code == 0
    assert "1 calls were cut" in log


def test_sigterm_while_loading(model: Path) -> None:
    with serve(model) as server:
        assert server.process.stderr is not None
        line = server.process.stderr.readline()
        assert line.startswith("listening on http://127.0.0.1:")
        pid = server.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        while not (engine := children.read_text().split()):
            pass
        server.process.send_signal(signal.SIGTERM)
        code, log = server.end()
    assert code == 0
    assert "Traceback" not in log
    assert not Path(f"/proc/{engine[0]}").exists()


def test_second_signal_ends_at_once(model: Path) -> None:
    with serve(model, "--fake-step-ms", "20") as server:
        lines = stream_lines(server.wait_ready(), max_tokens=500)
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stderr is not None
        while "shutting down" not in (line := server.process.stderr.readline()):
            assert line
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 128 + signal.SIGTERM
        with pytest.raises(httpx.HTTPError):
            list(lines)


def test_a_killed_engine_is_replaced(model: Path) -> None:
    with serve(model, "--fake-step-ms", "20") as server:
        url = server.wait_ready()
        lines = stream_lines(url, max_tokens=500)
        next(lines)
        pid = server.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        last = json.loads(list(lines)[-1].removeprefix("data: "))
        assert last["error"]["code"] == "engine_dead"
        while (answer := httpx.post(f"{url}/v1/completions", json={"prompt": "y", "max_tokens": 2})).status_code != 200:
            assert answer.status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200


def test_an_engine_that_keeps_dying_ends_the_server(model: Path) -> None:
    with serve(model, "--max-engine-restarts", "0") as server:
        server.wait_ready()
        pid = server.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        code, log = server.end()
    assert code == 1
    assert "the engine is dead" in log


def test_a_frozen_engine_is_replaced(model: Path) -> None:
    with serve(model, "--fake-step-ms", "20", "--engine-timeout-s", "1") as server:
        url = server.wait_ready()
        lines = stream_lines(url, max_tokens=500)
        next(lines)
        pid = server.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(child), signal.SIGSTOP)
        last = json.loads(list(lines)[-1].removeprefix("data: "))
        assert last["error"]["code"] == "engine_dead"
        while (answer := httpx.post(f"{url}/v1/completions", json={"prompt": "y", "max_tokens": 2})).status_code != 200:
            assert answer.status_code == 503
        assert not Path(f"/proc/{child}").exists()
