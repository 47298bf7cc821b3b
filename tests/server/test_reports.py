"""What is told of calls: log lines with and without prompts, trace spans, timing headers, metrics, the dashboard."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import FakeDelta, FakeLLM
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.applications import Starlette

from octavo.errors import EngineDeadError
from octavo.logs import JsonFormatter
from octavo.server.context import ServerContext
from octavo.server.dashboard import dashboard
from octavo.server.report import CallerFilter
from octavo.server.tracing import Tracer

BODY = {"prompt": "a secret", "max_tokens": 3}


@pytest.fixture
def context(app: Starlette) -> ServerContext:
    context = app.state.context
    assert isinstance(context, ServerContext)
    return context


class Lines(logging.Handler):
    """Lines as they would be written."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(JsonFormatter())
        self.addFilter(CallerFilter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = Lines()
    logger = logging.getLogger("octavo")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_calls_are_logged_when_asked_for(
    client: httpx.AsyncClient, context: ServerContext, lines: list[str]
) -> None:
    await client.post("/v1/completions", json=BODY)
    assert lines == []
    context.settings = replace(context.settings, log_requests=True)
    await client.post("/v1/completions", json={**BODY, "n": 2}, headers={"x-request-id": "mine"})
    (line,) = [json.loads(line) for line in lines]
    expected = {
        "request_id": "mine",
        "tenant": "default",
        "outcome": "ok",
        "n": 2,
        "prompt_tokens": 8,
        "cached_tokens": 16,
        "output_tokens": 6,
        "finish_reasons": ["length", "length"],
        "queue_s": 0.01,
        "level": "info",
    }
    assert expected.items() <= line.items()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert "secret" not in lines[0]
    context.settings = replace(context.settings, log_prompts=True)
    await client.post("/v1/completions", json=BODY)
    await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "words"}]})
    assert json.loads(lines[1])["prompts_text"] == ["a secret"]
    assert "<|im_start|>user\nwords<|im_end|>" in json.loads(lines[2])["prompts_text"][0]


async def test_errors_and_whose_they_are(
    client: httpx.AsyncClient, context: ServerContext, llm: FakeLLM, lines: list[str]
) -> None:
    context.settings = replace(context.settings, log_requests=True)
    llm.script = lambda request: [EngineDeadError("gone")]
    await client.post("/v1/completions", json=BODY)
    assert json.loads(lines[-1])["outcome"] == "EngineDeadError"
    llm.script = lambda request: [ZeroDivisionError("a bug")]
    await client.post("/v1/completions", json=BODY, headers={"x-request-id": "unlucky"})
    trace = next(json.loads(line) for line in lines if "exception" in line)
    assert trace["request_id"] == "unlucky"
    assert "ZeroDivisionError: a bug" in trace["exception"]


async def test_timing_headers(client: httpx.AsyncClient) -> None:
    for body in (BODY, {**BODY, "stream": True}):
        answer = await client.post("/v1/completions", json=body)
        assert answer.headers["x-octavo-queue-ms"] == "10.0"
        assert 0 <= float(answer.headers["x-octavo-first-token-ms"]) <= float(answer.headers["openai-processing-ms"])
    assert "x-octavo-queue-ms" not in (await client.get("/version")).headers


def spans_of(context: ServerContext) -> tuple[Tracer, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter)
    context.reporter._tracer = tracer
    return tracer, exporter


class HungExporter(InMemorySpanExporter):
    """A collector that answers when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let_go = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.let_go.wait()
        return super().export(spans)


async def test_a_collector_that_hangs_does_not_keep_the_server(
    client: httpx.AsyncClient, context: ServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.server.tracing.FLUSH_S", 0.01)
    exporter = HungExporter()
    context.tracer = context.reporter._tracer = Tracer(exporter)
    await client.post("/v1/completions", json=BODY)
    context.close()
    assert exporter.asked.wait(30)
    assert exporter.get_finished_spans() == ()
    exporter.let_go.set()


async def test_a_span_a_call(client: httpx.AsyncClient, context: ServerContext, llm: FakeLLM) -> None:
    tracer, exporter = spans_of(context)
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01", "x-request-id": "traced"}
    await client.post("/v1/completions", json={**BODY, "temperature": 0.5}, headers=headers)
    await client.post("/v1/completions", json=BODY, headers={"traceparent": "00-zz-1-01"})
    llm.script = lambda request: [EngineDeadError("gone")]
    await client.post("/v1/completions", json=BODY)
    tracer.close()
    spans: tuple[ReadableSpan, ...] = exporter.get_finished_spans()
    child, root, failed = spans
    assert child.context is not None
    assert format(child.context.trace_id, "032x") == trace_id
    assert child.parent is not None
    assert format(child.parent.span_id, "016x") == span_id
    assert root.parent is None
    attributes: dict[str, Any] = dict(child.attributes or {})
    assert attributes["gen_ai.request.id"] == "traced"
    assert attributes["gen_ai.usage.completion_tokens"] == 3
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.latency.time_in_queue"] == 0.01
    assert "secret" not in str(attributes)
    assert child.start_time is not None
    assert child.end_time is not None
    assert 0 <= child.end_time - child.start_time < 60e9
    assert [span.status.status_code for span in spans] == [StatusCode.UNSET, StatusCode.UNSET, StatusCode.ERROR]
    assert failed.status.description == "EngineDeadError"


async def test_histograms_of_calls(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={**BODY, "n": 2})
    text = (await client.get("/metrics")).text.splitlines()
    for line in (
        'octavo:request_generation_tokens_sum{model_name="tiny"} 6.0',
        'octavo:request_params_n_sum{model_name="tiny"} 2.0',
        'octavo:request_params_max_tokens_sum{model_name="tiny"} 3.0',
        'octavo:request_prefill_time_seconds_count{model_name="tiny"} 1.0',
        'octavo:request_decode_time_seconds_count{model_name="tiny"} 1.0',
        'octavo:request_inference_time_seconds_count{model_name="tiny"} 1.0',
        'octavo:request_time_per_output_token_seconds_count{model_name="tiny"} 1.0',
        'octavo:engine_up{model_name="tiny"} 1.0',
        "octavo:engine_restarts_total 0.0",
        'octavo:cache_config_info{block_size="16",groups="all",num_gpu_blocks="100"} 1.0',
    ):
        assert line in text, line


async def test_the_dashboard_asks_for_metrics_that_exist(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json=BODY)
    text = (await client.get("/metrics")).text
    families = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    names = set(families)
    names |= {name + "_bucket" for name, kind in families.items() if kind == "histogram"}
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"octavo:\w+|process_\w+", query)}
    assert len(asked) > 20
    assert asked <= names
    labels = {label for query in queries for label in re.findall(r"by \((\w+)\)", query)} - {"le"}
    assert all(f'{label}="' in text or label == "limit" for label in labels)
    json.dumps(dashboard())


async def test_a_grammar_that_fails_is_told(client: httpx.AsyncClient, llm: FakeLLM) -> None:
    llm.script = lambda request: [[FakeDelta(finish_reason="error", stop_reason="too many items")]]
    refused = await client.post("/v1/completions", json=BODY)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "grammar_failed"
    assert "too many items" in refused.json()["error"]["message"]
    llm.script = lambda request: [[FakeDelta(finish_reason="error")]]
    assert (await client.post("/v1/completions", json=BODY)).status_code == 500
