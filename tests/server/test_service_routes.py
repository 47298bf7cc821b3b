"""Models, health, readiness, metrics, tokenization, keys, request ids."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_engine import FakeLLM, FakeStats
from starlette.applications import Starlette

from octavo.config import ServerConfig
from octavo.server.app import make_app
from octavo.server.pulse import SILENCE_S

HI = [{"role": "user", "content": "hi"}]


def client_of(llm: FakeLLM, **config: Any) -> httpx.AsyncClient:
    app = make_app(llm, ServerConfig(**config))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://octavo")


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["tiny"]
    assert listed["data"][0]["max_model_len"] == 128
    assert (await client.get("/v1/models/tiny")).json() == listed["data"][0]
    missing = await client.get("/v1/models/other/name")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_served_names(llm: FakeLLM) -> None:
    client = client_of(llm, served_model_name=["first", "second"])
    for name in ("first", "second"):
        answer = await client.post("/v1/completions", json={"prompt": "x", "model": name})
        assert answer.json()["model"] == name
    assert (await client.post("/v1/completions", json={"prompt": "x"})).json()["model"] == "first"
    assert (await client.post("/v1/completions", json={"prompt": "x", "model": "tiny"})).status_code == 404


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json()["version"]


@pytest.mark.parametrize("state", ["starting", "restarting", "dead"])
async def test_an_engine_that_is_not_ready(client: httpx.AsyncClient, llm: FakeLLM, state: str) -> None:
    llm.state = state
    llm.facts = None
    assert (await client.get("/health")).status_code == 503
    ready = await client.get("/ready")
    assert ready.status_code == 503
    assert ready.json() == {"status": state, "stage": "weights", "fraction": 0.5}
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        refused = await client.post(path, json={"messages": HI})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
    assert (await client.get("/v1/models")).status_code == 503
    assert (await client.get("/metrics")).status_code == 200


async def test_health_asks_the_engine_once_in_a_while(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.stats = None
    for _ in range(5):
        assert (await client.get("/health")).status_code == 200
    assert llm.num_pings == 1


async def test_health_of_a_silent_engine(
    client: httpx.AsyncClient, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr("octavo.server.pulse.time", clock)
    monkeypatch.setattr("octavo.server.pulse.PATIENCE_S", 0.02)
    assert (await client.get("/health")).status_code == 200
    llm.answers = False
    clock.now_s += 100 * SILENCE_S  # that nobody asked it for anything is no silence of its
    assert (await client.get("/health")).status_code == 200
    clock.now_s += SILENCE_S - 0.1
    assert (await client.get("/health")).status_code == 200
    clock.now_s += 0.2
    assert (await client.get("/health")).status_code == 503
    llm.num_restarts += 1  # the next engine owes nothing yet
    assert (await client.get("/health")).status_code == 200
    clock.now_s += SILENCE_S + 0.1
    assert (await client.get("/health")).status_code == 503
    assert llm.stats is not None
    llm.stats.num_steps += 1
    assert (await client.get("/health")).status_code == 200


async def test_an_engine_that_is_busy_is_told_of_by_its_newest_numbers(
    app: Starlette, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.server.pulse.PATIENCE_S", 0.02)
    pulse = app.state.context.pulse
    assert llm.stats is not None
    llm.stats.num_running += 7  # of a frame before the requests were aborted
    answered = await pulse.stats()
    llm.answers = False
    assert await pulse.stats() == answered
    llm.stats.num_steps += 1
    assert (await pulse.stats())["num_running"] == answered["num_running"] + 7
    llm.num_restarts += 1
    llm.stats = None
    assert await pulse.stats() == {}


async def test_metrics(client: httpx.AsyncClient) -> None:
    await client.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 3})
    await client.get("/v1/models/tiny")
    await client.get("/v1/nothing/tiny")
    text = (await client.get("/metrics")).text
    for line in (
        'octavo:num_requests_running{model_name="tiny"} 2.0',
        'octavo:num_requests_waiting{model_name="tiny"} 3.0',
        'octavo:kv_cache_usage_perc{model_name="tiny"} 0.25',
        'octavo:prefix_cache_hits_total{model_name="tiny"} 16.0',
        'octavo:prefix_cache_queries_total{model_name="tiny"} 40.0',
        'octavo:generation_tokens_total{model_name="tiny"} 60.0',
        'octavo:num_preemptions_total{model_name="tiny"} 4.0',
        'octavo:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'octavo:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'octavo:time_to_first_token_seconds_bucket{le="+Inf",model_name="tiny"} 1.0',
        'octavo:inter_token_latency_seconds_count{model_name="tiny"} 2.0',
        'octavo:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
        'octavo:request_queue_time_seconds_count{model_name="tiny"} 1.0',
        'octavo:http_responses_total{path="/v1/chat/completions",status="200"} 1.0',
        'octavo:http_responses_total{path="/v1/models/{name:path}",status="200"} 1.0',
        'octavo:http_responses_total{path="other",status="404"} 1.0',
    ):
        assert line in text.splitlines(), line


async def test_a_slash_too_many_is_no_matter(client: httpx.AsyncClient) -> None:
    for path in ("/v1/models", "/health", "/version"):
        answer = await client.get(path + "/", follow_redirects=True)
        assert (answer.status_code, answer.content) == (200, (await client.get(path)).content)


async def test_metrics_of_a_busy_engine_are_the_newest_known(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.answers = False
    llm.stats = FakeStats(num_running=8)
    assert 'octavo:num_requests_running{model_name="tiny"} 8.0' in (await client.get("/metrics")).text


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a<|im_end|>é", "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["count"] == len(answer["tokens"]) == 4
    assert answer["token_strs"][:2] == ["a", "<|im_end|>"]
    back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "a<|im_end|>é"}


async def test_tokenize_of_messages_is_what_chat_submits(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    messages = [{"role": "user", "content": "a <|im_end|> b"}]
    answer = (await client.post("/tokenize", json={"messages": messages})).json()
    await client.post("/v1/chat/completions", json={"messages": messages})
    assert llm.submitted[0].token_ids == answer["tokens"]


async def test_models_without_a_tokenizer() -> None:
    client = client_of(FakeLLM(None, None))
    answer = await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2, "return_token_ids": True})
    assert answer.json()["choices"][0]["token_ids"] == [97, 98]
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        refused = await client.post(path, json=body)
        assert refused.status_code == 400
        assert "no tokenizer" in refused.json()["error"]["message"]


async def test_keys(llm: FakeLLM) -> None:
    client = client_of(llm, api_key=["one", "two"])
    for header in ("", "Bearer", "Bearer three", "Basic one", "one", "Bearer one two", "Bearer \xff"):
        headers = {"authorization": header.encode("latin-1")} if header else {}
        for path in ("/v1/models", "/metrics", "/version", "/nothing"):
            refused = await client.get(path, headers=headers)  # type: ignore[arg-type]
            assert refused.status_code == 401, (header, path)
            assert refused.json()["error"]["code"] == "invalid_api_key"
    for key in ("one", "two"):
        assert (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2:x", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ('a"b', False), ("", False)],
)
async def test_request_ids(client: httpx.AsyncClient, given: str, kept: bool) -> None:
    answer = await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": given})
    returned = answer.headers["x-request-id"]
    assert (returned == given) == kept
    assert answer.json()["id"] == f"cmpl-{returned}"


def test_the_app_does_not_import_torch() -> None:
    code = "import sys, octavo.server.app, octavo.server.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
