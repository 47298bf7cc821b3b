"""What GET /metrics shows. Counters of the engine are read at scrape time; the server adds its own histograms.

Histograms are observed once or more per token, so they are two lists and a bisection, not prometheus_client's locks;
everything runs in the event loop's thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from octavo.protocol import ModelFacts
from octavo.server.report import CallReport
from octavo.server.tenants.tenant import Tenant

PREFIX = "octavo:"
_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_SLOW_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = tuple(float(4**i) for i in range(10))

Stats = Mapping[str, float]
"""The engine's numbers by the names of `EngineStats`."""

# Metric -> (help, key of Stats). Names after the prefix are those that dashboards of other engines know.
GAUGES = {
    "num_requests_running": ("Sequences in the running batch.", "num_running"),
    "num_requests_waiting": ("Requests in the queue.", "num_waiting"),
}
LIMITS = {"max_requests_waiting": ("Requests that the queue takes.", "max_waiting")}
"""Likewise; the server knows these numbers."""
COUNTERS = {
    "engine_steps": ("Steps that the engine has run.", "num_steps"),
    "num_preemptions": ("Sequences pushed out for lack of blocks, to be computed again.", "num_preemptions"),
    "prompt_tokens": ("Prompt tokens computed.", "num_prompt_tokens"),
    "generation_tokens": ("Tokens generated.", "num_output_tokens"),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_queried_tokens"),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    "spec_decode_num_drafts": ("Drafts that were verified.", "num_drafts"),
    "spec_decode_num_draft_tokens": ("Tokens of these drafts.", "num_draft_tokens"),
    "spec_decode_num_accepted_tokens": ("Tokens of these drafts that were right.", "num_accepted_tokens"),
    "requests_aborted": ("Sequences ended by their client.", "num_aborted"),
    "requests_refused": ("Requests that were not taken: the queue was full, or they were invalid.", "num_refused"),
}
STATS_KEYS = ("num_blocks", "num_free_blocks", *(key for _, key in (*GAUGES.values(), *COUNTERS.values())))


# (name, help, bounds, what of a call that ended well is observed; None: nothing).
CALL_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...], Callable[[CallReport], float | None]], ...] = (
    ("e2e_request_latency_seconds", "From arrival to the last token.", _SLOW_S, lambda call: call.total_s),
    ("request_inference_time_seconds", "From the first step to the last token.", _SLOW_S, lambda c: c.inference_s),
    ("request_prefill_time_seconds", "From the first step to the first token.", _SLOW_S, lambda c: c.prefill_s),
    ("request_decode_time_seconds", "From the first token to the last.", _SLOW_S, lambda call: call.decode_s),
    ("request_time_per_output_token_seconds", "Decode time over tokens.", _FAST_S, lambda call: call.token_s),
    ("request_prompt_tokens", "Prompt tokens of a call.", _TOKENS, lambda call: call.num_prompt_tokens),
    ("request_generation_tokens", "Tokens generated for a call.", _TOKENS, lambda call: call.num_output_tokens),
    ("request_params_n", "Sequences asked for by prompt.", _TOKENS, lambda call: call.params.n),
    ("request_params_max_tokens", "Most tokens asked for, where a call says.", _TOKENS, lambda c: c.params.max_tokens),
)


class Histogram:
    """Counts by bucket, and a sum."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, model: str) -> Metric:
        """The metric with cumulative buckets, as Prometheus wants it."""
        family = HistogramMetricFamily(PREFIX + self.name, self.help, labels=["model_name"])
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        family.add_metric([model], buckets=buckets, sum_value=self._sum)
        return family


class EngineState(Protocol):
    """What is asked of the engine's client (`AsyncLLM`)."""

    @property
    def state(self) -> str: ...
    @property
    def num_restarts(self) -> int: ...
    @property
    def facts(self) -> ModelFacts | None: ...


class ServerMetrics(Collector):
    """The metrics of one server; `model` gives the `model_name` label, None before it is known."""

    def __init__(
        self, model: Callable[[], str | None], engine: EngineState, tenants: Callable[[], Iterable[Tenant]]
    ) -> None:
        self._model = model
        self._engine = engine
        self._tenants = tenants
        self._stats: Stats = {}
        self._finished: Counter[str] = Counter()
        self._responses: Counter[tuple[str, str]] = Counter()
        self.first_token_s = Histogram("time_to_first_token_seconds", "From arrival to the first token.", _FAST_S)
        self.inter_token_s = Histogram("inter_token_latency_seconds", "Between outputs of one request.", _FAST_S)
        self.queue_s = Histogram("request_queue_time_seconds", "In the engine's queue.", _FAST_S)
        self._of_calls = [(Histogram(name, text, bounds), value) for name, text, bounds, value in CALL_HISTOGRAMS]
        self._histograms = [self.first_token_s, self.inter_token_s, self.queue_s, *(each for each, _ in self._of_calls)]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def finished(self, reason: str) -> None:
        """A sequence ended."""
        self._finished[reason] += 1

    def count_call(self, report: CallReport) -> None:
        """A call ended well."""
        for histogram, value_of in self._of_calls:
            value = value_of(report)
            if value is not None:
                histogram.observe(value)

    def count_response(self, path: str, status: int) -> None:
        """An HTTP answer began."""
        self._responses[path, str(status)] += 1

    def collect(self) -> Iterable[Metric]:
        """All families; called by prometheus_client at scrape time."""
        model = self._model() or ""
        stats = self._stats
        for name, (text, key) in {**GAUGES, **LIMITS}.items():
            yield _gauge(name, text, model, stats.get(key, 0))
        num_blocks = stats.get("num_blocks", 0)
        usage = 1 - stats.get("num_free_blocks", 0) / num_blocks if num_blocks else 0.0
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", model, usage)
        yield _gauge("engine_up", "1 while requests are taken.", model, float(self._engine.state == "ready"))
        cache = GaugeMetricFamily(
            PREFIX + "cache_config_info",
            "1; the labels tell of the KV cache, whose groups of layers share its blocks.",
            labels=["block_size", "num_gpu_blocks", "groups"],
        )
        facts = self._engine.facts
        if facts is not None:
            groups = ",".join(f"{kind} {size}" if size else kind for kind, size in facts.cache_groups)
            cache.add_metric([str(facts.block_size), str(facts.num_blocks), groups], 1)
        yield cache
        restarts = CounterMetricFamily(PREFIX + "engine_restarts", "Engines that ended and were replaced.")
        restarts.add_metric([], self._engine.num_restarts)
        yield restarts
        for name, (text, key) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([model], stats.get(key, 0))
            yield counter
        success = CounterMetricFamily(
            PREFIX + "request_success", "Sequences that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([model, reason], count)
        yield success
        responses = CounterMetricFamily(PREFIX + "http_responses", "HTTP answers.", labels=["path", "status"])
        for (path, status), count in self._responses.items():
            responses.add_metric([path, status], count)
        yield responses
        for histogram in self._histograms:
            yield histogram.family(model)
        yield from _tenant_families(self._tenants())

    def exposition(self, stats: Stats) -> bytes:
        """The text that Prometheus scrapes, with the engine's numbers of now."""
        self._stats = stats
        return generate_latest(self._registry)


# Counter of a tenant -> (help, field of `Usage`).
TENANT_COUNTERS = {
    "tenant_calls": ("Calls that a tenant's limits let through.", "num_calls"),
    "tenant_prompt_tokens": ("Prompt tokens submitted.", "num_prompt_tokens"),
    "tenant_cached_tokens": ("Prompt tokens that came from the prefix cache.", "num_cached_tokens"),
    "tenant_generation_tokens": ("Tokens generated.", "num_output_tokens"),
}


def _tenant_families(tenants: Iterable[Tenant]) -> Iterable[Metric]:
    everybody = list(tenants)
    running = GaugeMetricFamily(PREFIX + "tenant_calls_running", "Calls in flight.", labels=["tenant"])
    refused = CounterMetricFamily(
        PREFIX + "tenant_calls_refused", "Calls beyond a tenant's limits.", labels=["tenant", "limit"]
    )
    for tenant in everybody:
        running.add_metric([tenant.name], tenant.num_live)
        for limit, count in tenant.usage.refused.items():
            refused.add_metric([tenant.name, limit], count)
    yield running
    yield refused
    for name, (text, field) in TENANT_COUNTERS.items():
        family = CounterMetricFamily(PREFIX + name, text, labels=["tenant"])
        for tenant in everybody:
            family.add_metric([tenant.name], getattr(tenant.usage, field))
        yield family


def _gauge(name: str, text: str, model: str, value: float) -> Metric:
    gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
    gauge.add_metric([model], value)
    return gauge
