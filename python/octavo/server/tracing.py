"""OpenTelemetry: one span a call, with the names of the semantic conventions for generative AI.

The only file that knows opentelemetry, which is optional (`pip install octavo[otel]`). Spans are made when a call is
over, from its report; a W3C `traceparent` header makes them children of the client's span.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from octavo.errors import ConfigError
from octavo.server.report import CallReport

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
FLUSH_S = 2.0


class Tracer:
    """Sends spans through an exporter, in batches from a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": "octavo"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo")

    @classmethod
    def to_endpoint(cls, endpoint: str) -> Tracer:
        """To an OTLP/HTTP collector such as http://127.0.0.1:4318/v1/traces.

        Raises:
            ConfigError: That is no such address, or the packages are missing.
        """
        if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
            message = f"--otlp-traces-endpoint: {endpoint[:200]!r} is not http(s)://HOST[:PORT]/PATH"
            raise ConfigError(message, "otlp_traces_endpoint")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'octavo[otel]'") from None
        return cls(OTLPSpanExporter(endpoint=endpoint))

    def record(self, report: CallReport) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end_ns = int(report.end_s * 1e9)
        span = self._tracer.start_span(
            "llm_request",
            context=_parent(report.traceparent),
            kind=SpanKind.SERVER,
            start_time=end_ns - int(report.total_s * 1e9),
            attributes=_attributes(report),
        )
        if report.outcome not in ("ok", "aborted"):
            span.set_status(Status(StatusCode.ERROR, report.outcome))
        span.end(end_ns)

    def close(self) -> None:
        """Send what is left, for a while: a collector that does not answer does not keep the server."""
        ending = threading.Thread(target=self._provider.shutdown, name="octavo-traces", daemon=True)
        ending.start()
        ending.join(FLUSH_S)


def _parent(traceparent: str | None) -> Context | None:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    found = _TRACEPARENT.fullmatch(traceparent or "")
    if found is None:
        return None
    context = SpanContext(
        trace_id=int(found[1], 16), span_id=int(found[2], 16), is_remote=True, trace_flags=TraceFlags(int(found[3], 16))
    )
    return set_span_in_context(NonRecordingSpan(context)) if context.is_valid else None


def _attributes(report: CallReport) -> dict[str, Any]:
    """Names as other engines' dashboards have them; what is unknown is left out."""
    values = {
        "gen_ai.request.id": report.request_id,
        "gen_ai.request.n": report.params.n,
        "gen_ai.request.max_tokens": report.params.max_tokens,
        "gen_ai.request.temperature": report.params.temperature,
        "gen_ai.request.top_p": report.params.top_p,
        "gen_ai.response.model": report.model,
        "gen_ai.response.finish_reasons": report.finish_reasons,
        "gen_ai.usage.num_sequences": report.params.n * report.num_prompts,
        "gen_ai.usage.prompt_tokens": report.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": report.num_output_tokens,
        "gen_ai.latency.time_in_queue": report.queue_s,
        "gen_ai.latency.time_to_first_token": report.first_token_s,
        "gen_ai.latency.e2e": report.total_s,
        "octavo.tenant": report.tenant,
        "octavo.outcome": report.outcome,
    }
    return {name: value for name, value in values.items() if value is not None}
