"""Public failures of operation: departures, overload, urgency, deaths, ids in use twice, sizes, internal sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.cases.calls import CANARY, TEXT, choice_of, post, stream
from tests.cases.conftest import FLAGS
from tests.server.serving import ServerProcess

LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True}
GONE_S = 2.0
REFUSED_S = 0.2
"""In which a call is told that there is no place, though fifty come at once; on a busy machine, before the slot is
free."""


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """Values by name without prefix and labels."""
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = [line.rpartition(" ") for line in lines if line.startswith("octavo:")]
    return {name.removeprefix("octavo:").partition("{")[0]: float(value) for name, _, value in pairs}


async def idle(client: httpx.AsyncClient) -> float:
    """Wait until nothing runs, waits or holds blocks; how long it took."""
    start_s = time.monotonic()
    while True:
        now = await metrics(client)
        busy = [now[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
        if not any(busy):
            return time.monotonic() - start_s
        await asyncio.sleep(0)


async def first_line(client: httpx.AsyncClient, **body: Any) -> float:
    """When a stream's first event came."""
    async with client.stream("POST", TEXT, json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line:
                return time.monotonic()
    raise AssertionError("no event")


async def test_sc04_clients_that_leave(client: httpx.AsyncClient, url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as leaving:
        calls = [asyncio.create_task(leaving.post(TEXT, json=LONG)) for _ in range(8)]
        streams = [asyncio.create_task(stream(leaving, TEXT, **LONG)) for _ in range(8)]
        while (await metrics(client))["num_requests_running"] < 16:
            await asyncio.sleep(0)
        for task in (*calls, *streams):
            task.cancel()
    assert await idle(client) < GONE_S
    start_s = time.monotonic()
    assert (await choice_of(client, TEXT, **CANARY))["finish_reason"] == "length"
    assert time.monotonic() - start_s < GONE_S


async def test_sc06_short_prompts_beside_long_ones(cramped: httpx.AsyncClient) -> None:
    """Chunks of 24 tokens: a long prompt takes seven steps, the short one is answered before it; beside one long prompt
    and beside four, everybody's text is that of the request alone."""
    steady = {"prompt": "Once", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    few = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    short = {**few, "prompt": "short"}
    wanted = [(await choice_of(cramped, TEXT, **body))["text"] for body in (steady, short)]
    for copies in ("a", "bcde"):
        long = [{**few, "prompt": copy * 60 + "y" * 60} for copy in copies]  # no prefix is known
        watched = asyncio.create_task(stream(cramped, TEXT, **steady))
        while not (await metrics(cramped))["num_requests_running"]:
            await asyncio.sleep(0)
        longs = [asyncio.create_task(told(cramped, **body)) for body in long]
        while not longs[0].done() and not (await metrics(cramped))["num_requests_running"] >= 2:
            await asyncio.sleep(0)
        short_s, short_text = await told(cramped, **short)
        found = await asyncio.gather(*longs)
        assert short_s < max(first_s for first_s, _ in found) + 0.5
        assert [(await watched).text(), short_text] == wanted
        assert [text for _, text in found] == [(await choice_of(cramped, TEXT, **body))["text"] for body in long]
        await idle(cramped)


async def told(client: httpx.AsyncClient, **body: Any) -> tuple[float, str]:
    """When a stream's first event came, and its text."""
    first_s, text = 0.0, ""
    async with client.stream("POST", TEXT, json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            first_s = first_s or time.monotonic()
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return first_s, text


NARROW = (
    *("--max-num-seqs", "1", "--max-queued-requests", "4", "--scheduling-policy", "priority"),
    *("--num-gpu-blocks-override", "512", "--max-num-batched-tokens", "128"),
)


async def test_sc07_sc08_a_bounded_queue_and_urgent_calls(model: Path) -> None:
    with ServerProcess("--model", str(model), *FLAGS, *NARROW) as server:
        async with httpx.AsyncClient(base_url=server.wait_ready(), timeout=60) as client:
            await overload(client)
            await urgency(client)


async def overload(client: httpx.AsyncClient) -> None:
    """SC-07: twice fifty calls at once on one slot and four places, a third of them streams, a quarter with n=4; half
    of the first fifty leave."""
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=client.base_url, timeout=60, limits=limits) as crowd:
        blocker = asyncio.create_task(timed(crowd, max_tokens=300))
        while not (await metrics(client))["num_requests_running"]:
            await asyncio.sleep(0)
        assert (await metrics(client))["max_requests_waiting"] == 4
        first = rush(crowd)
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        for call in first[::2]:
            call.cancel()
        stayed = await asyncio.gather(*first[1::2])
        left = await asyncio.gather(*first[::2], return_exceptions=True)
        again = await asyncio.gather(*rush(crowd))
        blocked, blocker_s = await blocker
        assert blocked.status_code == 200
    assert any(isinstance(answer, asyncio.CancelledError) for answer in left)
    told = [*stayed, *again, *(answer for answer in left if not isinstance(answer, BaseException))]
    refused = [(answer, seconds) for answer, seconds in told if answer.status_code == 429]
    served = [answer for answer, _ in told if answer.status_code == 200]
    assert len(served) + len(refused) == len(told)
    assert any(answer.status_code == 200 for answer, _ in again), "those who left kept their places"
    assert refused, "the queue has no end"
    for answer, _ in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"
    quick_s = statistics.quantiles(seconds for _, seconds in refused)[0]
    assert quick_s < max(REFUSED_S, blocker_s), "they waited for a place before they were refused"
    for answer in served:
        if not answer.headers["content-type"].startswith("text/event-stream"):
            assert all(choice["finish_reason"] == "length" for choice in answer.json()["choices"])
    assert (await metrics(client))["requests_refused_total"] >= len(refused)
    await idle(client)


async def timed(client: httpx.AsyncClient, **body: Any) -> tuple[httpx.Response, float]:
    """An answer, and how many seconds it took."""
    start_s = time.monotonic()
    answer = await client.post(TEXT, json={"prompt": "abc", "max_tokens": 20, "ignore_eos": True, **body})
    return answer, time.monotonic() - start_s


def rush(client: httpx.AsyncClient) -> list[asyncio.Task[tuple[httpx.Response, float]]]:
    """Fifty calls at once."""
    kinds = [{"n": 4 if i % 4 == 3 else 1, "stream": i % 3 == 0} for i in range(50)]
    return [asyncio.create_task(timed(client, **kind)) for kind in kinds]


async def urgency(client: httpx.AsyncClient) -> None:
    """SC-08: an urgent call takes the only slot, and the one pushed out goes on as if nothing had happened."""
    body = {"prompt": "Once", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    alone = await choice_of(client, TEXT, **body)
    low = asyncio.create_task(choice_of(client, TEXT, **body, priority=10))
    while not (await metrics(client))["num_requests_running"]:
        await asyncio.sleep(0)
    before = (await metrics(client))["num_preemptions_total"]
    await first_line(client, prompt="now", max_tokens=8, ignore_eos=True, priority=0)
    assert not low.done()
    assert (await low)["text"] == alone["text"]
    preempted = (await metrics(client))["num_preemptions_total"] - before
    assert preempted == 1
    equal = [choice_of(client, TEXT, prompt=f"p{i}", max_tokens=8, ignore_eos=True, priority=3) for i in range(4)]
    await asyncio.gather(*equal)
    assert (await metrics(client))["num_preemptions_total"] == before + 1
    for wrong in ("high", 1.5, 2**40):
        status, answer = await post(client, TEXT, {"prompt": "x", "priority": wrong})
        assert (status, answer["error"]["param"]) == (400, "priority")
    await idle(client)


async def test_sc09_sc10_deaths_and_an_orderly_end(model: Path) -> None:
    with ServerProcess("--model", str(model), *FLAGS, "--num-gpu-blocks-override", "512") as server:
        async with httpx.AsyncClient(base_url=server.wait_ready(), timeout=60) as client:
            await engine_dies(client, server)
            await ends_well(client, server)


def engine_of(server: ServerProcess) -> int:
    pid = server.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


async def engine_dies(client: httpx.AsyncClient, server: ServerProcess) -> None:
    """SC-09: everybody is told within seconds, /health is honest, the next engine serves."""
    calls = [asyncio.create_task(client.post(TEXT, json={**LONG, "stream": i < 3})) for i in range(5)]
    while (await metrics(client))["time_to_first_token_seconds_count"] < 5:
        await asyncio.sleep(0)
    first = engine_of(server)
    start_s = time.monotonic()
    os.kill(first, signal.SIGKILL)
    answers = await asyncio.gather(*calls)
    assert time.monotonic() - start_s < 5
    for answer in answers[:3]:
        last = answer.text.rstrip().rpartition("\n\n")[2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert [answer.status_code for answer in answers] == [200, 200, 200, 503, 503]
    assert (await client.get("/health")).status_code == 503
    while (await client.get("/health")).status_code == 503:
        await asyncio.sleep(0.02)
    assert (await client.post(TEXT, json=CANARY)).status_code == 200
    assert not Path(f"/proc/{first}").exists()


async def ends_well(client: httpx.AsyncClient, server: ServerProcess) -> None:
    """SC-10: on SIGTERM what runs goes on to its end, new calls are refused, no process is left."""
    running = asyncio.create_task(client.post(TEXT, json={**LONG, "stream": True}))
    while not (await metrics(client))["num_requests_running"]:
        await asyncio.sleep(0)
    engine = engine_of(server)
    server.process.send_signal(signal.SIGTERM)
    while (await client.get("/ready")).status_code == 200:
        await asyncio.sleep(0)
    refused = await client.post(TEXT, json=CANARY)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert (await running).text.endswith("data: [DONE]\n\n")
    code, log = await asyncio.to_thread(server.end)
    assert code == 0
    assert "cut" not in log
    assert not Path(f"/proc/{engine}").exists()


async def test_sc11_one_id_for_several_calls(client: httpx.AsyncClient) -> None:
    prompts = [f"prompt {i}" for i in range(20)]
    body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "request_id": "same"}
    alone = [(await choice_of(client, TEXT, prompt=prompt, **body))["text"] for prompt in prompts]
    headers = {"x-request-id": "same"}
    victim = asyncio.create_task(client.post(TEXT, json={**LONG, "stream": True}, headers=headers))
    calls = [client.post(TEXT, json={"prompt": prompt, **body}, headers=headers) for prompt in prompts]
    answers = asyncio.gather(*calls)
    victim.cancel()
    assert [answer.json()["choices"][0]["text"] for answer in await answers] == alone
    assert all(value >= 0 for value in (await metrics(client)).values())
    for bad in ("x" * 10**4, "", 'a"b', "a b"):
        answer = await client.post(TEXT, json=CANARY, headers={"x-request-id": bad})
        assert answer.status_code == 200
        assert len(answer.json()["id"]) < 64
    await idle(client)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /health HTTP/1.1\r\nX-A: " + "a" * (64 << 20), 431),
        ("GET /health HTTP/1.1\r\n" + "X-A: a\r\n" * 200_000, 431),
        ("GET /" + "a" * (1 << 20) + " HTTP/1.1\r\n", 431),
        (f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {100 << 30}\r\n\r\n", 413),
        (f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Encoding: gzip\r\n\r\n{{}}", 415),
        (f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400),
        (f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ],
)
def test_se10_sizes_of_requests(server: ServerProcess, head: str, status: int) -> None:
    parts = urlsplit(server.url)
    before = resident_bytes(server.process.pid)
    with socket.create_connection((parts.hostname, parts.port), 30) as connection:
        with suppress(ConnectionResetError, BrokenPipeError):  # it may have been refused already
            connection.sendall(head.encode())
        answer = connection.recv(65536)
    assert answer.split(b" ", 2)[1] == str(status).encode()
    assert resident_bytes(server.process.pid) - before < 64 << 20
    assert httpx.get(f"{server.url}/health").status_code == 200


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def inodes(pid: int) -> set[str]:
    """Of the process's sockets."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def test_se11_internal_sockets(server: ServerProcess) -> None:
    own = inodes(server.process.pid) | inodes(engine_of(server))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and row[9] in own]
    port = urlsplit(server.url).port
    assert port is not None
    assert listening == [f"0100007F:{port:04X}"], "only the API's port, and only on the address asked for"
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    (path,) = {row[7] for row in rows if row[6] in own and row[5] == "01" and len(row) > 7}
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    for garbage in (b"\x80\x04\x95" * 100, b"\xff" * 100_000, (8).to_bytes(4, "little") + b"\x02\x01" + b"\xff" * 6):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(path)
            with suppress(ConnectionResetError, BrokenPipeError):  # hung up on, as it should be
                connection.sendall(garbage)
                while connection.recv(65536):
                    pass
    assert httpx.post(f"{server.url}{TEXT}", json=CANARY, timeout=30).status_code == 200
