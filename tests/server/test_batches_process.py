"""A batch through `octavo serve`, whose process is killed in the middle and started again."""

from __future__ import annotations

import json
from pathlib import Path

import openai
from serving import ServerProcess, fake_model

NUM_REQUESTS = 60


def until(client: openai.OpenAI, name: str, num_completed: int) -> openai.types.Batch:
    """The batch, as soon as so many requests are done; each look is a request, so this does not spin."""
    while True:
        batch = client.batches.retrieve(name)
        assert batch.request_counts is not None
        if batch.request_counts.completed >= num_completed or batch.status == "completed":
            return batch


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_a_killed_server_goes_on(model_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    batches = ["--batch-dir", str(tmp_path / "batches"), "--batch-concurrency", "4"]
    arguments = [str(fake_model(model_folder, model)), "--runner", "fake", "--fake-step-ms", "4", *batches]
    body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body})
        for i in range(NUM_REQUESTS)
    ]
    with ServerProcess(*arguments) as server, client_of(server.wait_ready()) as client:
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        seen = until(client, batch.id, 8)
        assert seen.status == "in_progress"
        server.process.kill()
        server.process.wait(10)
    with ServerProcess(*arguments) as server, client_of(server.wait_ready()) as client:
        found = until(client, batch.id, 1)
        assert found.request_counts is not None
        assert found.request_counts.completed >= 8
        done = until(client, batch.id, NUM_REQUESTS + 1)
        assert done.request_counts is not None
        assert (done.status, done.request_counts.completed) == ("completed", NUM_REQUESTS)
        assert done.output_file_id is not None
        outputs = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
        assert [output["custom_id"] for output in outputs] == [f"r{i}" for i in range(NUM_REQUESTS)]
        assert {output["response"]["body"]["usage"]["completion_tokens"] for output in outputs} == {20}
