"""What goes wrong around a pooling engine: clients that leave, an engine that is killed; batches and tenants on it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from tests.pooling.tiny_models import save
from tests.server.serving import ServerProcess

LARGE = {"input": [[5 + i % 80] * 60 for i in range(2048)]}
"""Takes the tiny model a while."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("encoder")
    save(made, "BertModel", "BertConfig", num_hidden_layers=24)
    return made


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    lines = [line for line in (await client.get("/metrics")).text.splitlines() if not line.startswith("#")]
    return {re.split("[{ ]", line)[0]: float(line.rpartition(" ")[2]) for line in lines}


async def until(client: httpx.AsyncClient, met: Callable[[dict[str, float]], bool]) -> None:
    """Look at the metrics until they are as wanted; each look is a request, so this does not spin."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        values = await metrics(client)
        if met(values):
            return
    raise AssertionError(f"not met: {values}")


async def test_clients_that_leave_and_engines_that_die(folder: Path) -> None:
    arguments = ["--device", "cpu", "--max-num-batched-tokens", "66", "--admin-key", "root"]
    with ServerProcess(str(folder), *arguments) as server:
        async with httpx.AsyncClient(base_url=server.wait_ready(), timeout=120) as client:
            small = (await client.post("/v1/embeddings", json={"input": "w1"})).json()["data"]
            calls = asyncio.create_task(client.post("/v1/embeddings", json=LARGE, headers={"x-request-id": "large"}))
            await until(client, lambda values: values["octavo:num_requests_running"] == 1)
            beside = (await client.post("/v1/embeddings", json={"input": "w1"})).json()["data"]
            assert beside == small, "and it did not wait for the large one"
            assert not calls.done()
            answer = await client.post("/admin/abort", json={"request_id": "large"}, headers={"x-api-key": "root"})
            assert answer.json()["ended"] == 1
            answer = await calls
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
            calls = asyncio.create_task(client.post("/v1/embeddings", json=LARGE))
            await until(client, lambda values: values["octavo:num_requests_running"] == 1)
            calls.cancel()
            await until(client, lambda values: values["octavo:num_requests_running"] == 0)
            values = await metrics(client)
            assert values["octavo:engine_steps_total"] < 3000, "what nobody waited for was dropped"

            calls = asyncio.create_task(client.post("/v1/embeddings", json=LARGE))
            await until(client, lambda values: values["octavo:num_requests_running"] == 1)
            pid = server.process.pid
            (engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            os.kill(int(engine), signal.SIGKILL)
            answer = await calls
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
            await until(client, lambda values: values["octavo:engine_restarts_total"] == 1)
            assert (await client.post("/v1/embeddings", json={"input": "w1"})).json()["data"] == small
            os.kill(pid, signal.SIGTERM)
        assert server.end()[0] == 0


def test_batches_and_tenants(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    tenants = {"small": {"keys": ["k1"], "tokens_per_minute": 30}, "free": {"keys": ["k2"]}}
    keys.write_text(json.dumps({"tenants": tenants}))
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/embeddings", "body": {"input": f"w{i}"}} for i in range(5)
    ]
    lines[3]["body"] = {"input": ""}
    data = "\n".join(json.dumps(line) for line in lines).encode()
    arguments = ["--device", "cpu", "--batch-dir", str(tmp_path / "batches"), "--api-keys-file", str(keys)]
    with ServerProcess(str(folder), *arguments) as server:
        url = server.wait_ready()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k2", max_retries=0) as client:
            file = client.files.create(file=("in.jsonl", data), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
            while batch.status not in ("completed", "failed"):
                batch = client.batches.retrieve(batch.id)
            assert batch.request_counts is not None
            assert (batch.request_counts.completed, batch.request_counts.failed) == (4, 1)
        headers = {"Authorization": "Bearer k1"}
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "w1"}).status_code == 401
        first = httpx.post(f"{url}/v1/embeddings", json={"input": ["w1 " * 40]}, headers=headers)
        second = httpx.post(f"{url}/v1/embeddings", json={"input": "w1"}, headers=headers)
        assert (first.status_code, second.status_code) == (200, 429)
