"""What is told of a call when it is over: a log line, a trace span. Prompts are told only when asked for.

Not here: counters and histograms (metrics.py), how lines look (octavo/logs.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.sampling_params import SamplingParams
from octavo.server.settings import Settings
from octavo.server.tenants import caller

log = logging.getLogger("octavo.server")

MAX_PROMPT_CHARS = 4000


@dataclass(frozen=True, slots=True)
class CallReport:
    """One call. Times in seconds; `end_s` is of `time.time`, the others are durations from arrival."""

    request_id: str
    tenant: str
    model: str
    outcome: str
    """"ok", "aborted" (by its client), or the class of the error."""
    params: SamplingParams
    num_prompts: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: tuple[str, ...]
    end_s: float
    total_s: float
    queue_s: float | None
    first_token_s: float | None
    traceparent: str | None

    @property
    def inference_s(self) -> float | None:
        """From the first step to the last token."""
        return None if self.queue_s is None else self.total_s - self.queue_s

    @property
    def prefill_s(self) -> float | None:
        """From the first step to the first token."""
        return None if self.queue_s is None or self.first_token_s is None else self.first_token_s - self.queue_s

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        return None if self.first_token_s is None else self.total_s - self.first_token_s

    @property
    def token_s(self) -> float | None:
        """Decode time by token of a sequence; the first one is no decode."""
        decodes = self.num_output_tokens / (self.params.n * self.num_prompts) - 1
        return self.decode_s / decodes if self.decode_s is not None and decodes >= 1 else None

    def fields(self) -> dict[str, Any]:
        """For a JSON log line."""
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "model": self.model,
            "outcome": self.outcome,
            "n": self.params.n,
            "prompts": self.num_prompts,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "finish_reasons": list(self.finish_reasons),
            "queue_s": _rounded(self.queue_s),
            "first_token_s": _rounded(self.first_token_s),
            "total_s": _rounded(self.total_s),
        }

    def line(self) -> str:
        """For people."""
        return (
            f"{self.request_id} {self.outcome}: {self.num_prompt_tokens} prompt tokens ({self.num_cached_tokens} "
            f"cached), {self.num_output_tokens} output tokens in {self.total_s:.3f} s"
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


class Span(Protocol):
    """Who keeps traces (tracing.py)."""

    def record(self, report: CallReport) -> None: ...


class Reporter:
    """Tells of calls as the settings of now say."""

    def __init__(self, settings: Callable[[], Settings], tracer: Span | None) -> None:
        self._settings = settings
        self._tracer = tracer

    def tell(self, report: CallReport, prompts: Callable[[], list[str]]) -> None:
        """`prompts` is called only when prompts are to be shown."""
        settings = self._settings()
        if settings.log_requests:
            fields = report.fields()
            line = report.line()
            if settings.log_prompts:
                fields["prompts_text"] = [text[:MAX_PROMPT_CHARS] for text in prompts()]
                line = f"{line}; {fields['prompts_text']!r}"
            log.info("%s", line, extra={"fields": fields})
        if self._tracer is not None:
            self._tracer.record(report)


class CallerFilter(logging.Filter):
    """Adds the request id and the tenant of the call in progress to every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        call = caller.current()
        if call.request_id:
            known = {"request_id": call.request_id, "tenant": call.tenant.name}
            record.fields = {**known, **getattr(record, "fields", {})}
        return True
