"""Counts and times of one call as its tokens come: for its answer, its tenant, the metrics, the log and the trace.

Not here: where tokens come from (generation.py) and how a finished call is told of (report.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo._core import Delta
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError
from octavo.server.report import CallReport
from octavo.server.tenants import caller

if TYPE_CHECKING:
    from octavo.server.context import ServerContext
    from octavo.server.prompt import Prompt

ABORTED = "aborted"


class CallRecord:
    """Of a call that was submitted now. `count` for every batch, `end` once."""

    def __init__(self, context: ServerContext, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        self.caller = caller.current()
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.arrival_s = time.perf_counter()
        self._context = context
        self._metrics = context.metrics
        self._tenant = self.caller.tenant
        self._prompts = prompts
        self._params = params
        self._queue_s: float | None = None
        self._first_s = 0.0
        self._last_s = 0.0
        self._finish_reasons: list[str] = []
        self._has_ended = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self._prompts)

    def count(self, deltas: list[Delta], *, counts_prompt: bool = True) -> None:
        """A batch has come. `ApiError` when it says that the engine could not go on with a sequence.

        Args:
            counts_prompt: Tokens of its prompt that were in the cache are news.
        """
        now_s = time.perf_counter()
        if self._last_s:
            self._metrics.inter_token_s.observe(now_s - self._last_s)
        else:
            self._first_s = now_s
            self._metrics.first_token_s.observe(now_s - self.arrival_s)
            self.caller.first_token_s = now_s - self.caller.arrival_s
        self._last_s = now_s
        before = self.num_output_tokens
        for delta in deltas:
            self.num_output_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self.finish(delta.finish_reason, delta.stop_reason)
            if counts_prompt and delta.num_cached_tokens is not None and delta.index == 0:
                self.num_cached_tokens += delta.num_cached_tokens
                self._tenant.usage.num_cached_tokens += delta.num_cached_tokens
            if delta.queue_s is not None:
                self.begun(delta.queue_s)
        self._tenant.count_output(self.num_output_tokens - before)

    def begun(self, queue_s: float) -> None:
        """A prompt has waited for so long before it ran."""
        self._metrics.queue_s.observe(queue_s)
        self._queue_s = self.caller.queue_s = max(self._queue_s or 0.0, queue_s)

    def finish(self, reason: str, why: int | str | None = None) -> None:
        """A sequence has ended. `ApiError` when it could not go on; a text says that its grammar failed."""
        if reason == "error" and isinstance(why, str):
            message = f"the output could not be kept to what structured_outputs asks for: {why}"
            raise ApiError(400, message, param="structured_outputs", code="grammar_failed")
        if reason == "error":
            raise ApiError(500, "the engine could not finish this request", kind="internal_error")
        self._metrics.finished(reason)
        self._finish_reasons.append(reason)

    def end(self, outcome: str) -> None:
        """The call is over: "ok", "aborted", or what went wrong. Only the first word counts."""
        if self._has_ended:
            return
        self._has_ended = True
        report = self._report(outcome)
        if outcome == "ok":
            self._metrics.count_call(report)
        self._context.reporter.tell(report, self._texts)

    def _report(self, outcome: str) -> CallReport:
        first_s = self._first_s - self.arrival_s if self._first_s else None
        return CallReport(
            request_id=self.caller.request_id,
            tenant=self._tenant.name,
            model=self._context.names[0] if self._context.names else "",
            outcome=outcome,
            params=self._params,
            num_prompts=len(self._prompts),
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            finish_reasons=tuple(self._finish_reasons),
            end_s=time.time(),
            total_s=time.perf_counter() - self.arrival_s,
            queue_s=self._queue_s,
            first_token_s=first_s,
            traceparent=self.caller.traceparent,
        )

    def _texts(self) -> list[str]:
        tokenizer = self._context.llm.tokenizer
        return [
            prompt.text if prompt.text is not None else tokenizer.decode(prompt.token_ids) if tokenizer else ""
            for prompt in self._prompts
        ]


def outcome_of(error: BaseException) -> str:
    """An exception in a word: the code of its answer, or its class."""
    return getattr(error, "code", None) or type(error).__name__
