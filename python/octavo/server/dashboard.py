"""A Grafana dashboard of the server's metrics: `python -m octavo.server.dashboard > octavo.json`, then import it.

Panels are a table; their queries name metrics of metrics.py only (a test compares).
"""

from __future__ import annotations

import json
from typing import Any

from octavo.server.metrics import PREFIX

RATE = "rate({name}[$__rate_interval])"


def _quantiles(name: str) -> list[tuple[str, str]]:
    """p50, p90 and p99 of a histogram."""
    buckets = RATE.format(name=f"{PREFIX}{name}_bucket")
    return [(f"p{q}", f"histogram_quantile(0.{q}, sum by (le) ({buckets}))") for q in (50, 90, 99)]


def _rates(*names: str) -> list[tuple[str, str]]:
    return [(name.removesuffix("_total"), f"sum({RATE.format(name=PREFIX + name)})") for name in names]


def _by(label: str, name: str) -> list[tuple[str, str]]:
    return [(f"{{{{{label}}}}}", f"sum by ({label}) ({RATE.format(name=PREFIX + name)})")]


# (title, unit, [(legend, query)]).
PANELS: tuple[tuple[str, str, list[tuple[str, str]]], ...] = (
    ("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
    ("Between tokens", "s", _quantiles("inter_token_latency_seconds")),
    ("Whole calls", "s", _quantiles("e2e_request_latency_seconds")),
    ("In the queue", "s", _quantiles("request_queue_time_seconds")),
    ("Tokens a second", "short", _rates("prompt_tokens_total", "generation_tokens_total")),
    (
        "Sequences",
        "short",
        [("running", f"sum({PREFIX}num_requests_running)"), ("waiting", f"sum({PREFIX}num_requests_waiting)")],
    ),
    ("KV blocks in use", "percentunit", [("{{model_name}}", f"{PREFIX}kv_cache_usage_perc")]),
    (
        "Prefix cache hits",
        "percentunit",
        [
            (
                "hits",
                f"sum({RATE.format(name=PREFIX + 'prefix_cache_hits_total')}) / "
                f"sum({RATE.format(name=PREFIX + 'prefix_cache_queries_total')})",
            )
        ],
    ),
    (
        "Drafted tokens that are right",
        "percentunit",
        [
            (
                "right",
                f"sum({RATE.format(name=PREFIX + 'spec_decode_num_accepted_tokens_total')}) / "
                f"sum({RATE.format(name=PREFIX + 'spec_decode_num_draft_tokens_total')})",
            )
        ],
    ),
    ("Answers by status", "short", _by("status", "http_responses_total")),
    ("Ends by reason", "short", _by("finished_reason", "request_success_total")),
    (
        "Preempted, refused, aborted",
        "short",
        _rates("num_preemptions_total", "requests_refused_total", "requests_aborted_total"),
    ),
    (
        "Engine",
        "short",
        [("up", f"min({PREFIX}engine_up)"), ("restarts", f"sum({PREFIX}engine_restarts_total)")],
    ),
    ("Output tokens by tenant", "short", _by("tenant", "tenant_generation_tokens_total")),
    ("Prompt tokens by tenant", "short", _by("tenant", "tenant_prompt_tokens_total")),
    ("Calls by tenant", "short", [("{{tenant}}", f"sum by (tenant) ({PREFIX}tenant_calls_running)")]),
    ("Refused by tenant", "short", _by("tenant", "tenant_calls_refused_total")),
    ("Memory of the API process", "bytes", [("resident", "process_resident_memory_bytes")]),
    ("Open files of the API process", "short", [("open", "process_open_fds")]),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "title": "Octavo",
        "uid": "octavo",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, title: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": source,
        "gridPos": {"w": 12, "h": 8, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "datasource": source, "expr": query, "legendFormat": legend}
            for i, (legend, query) in enumerate(queries)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
