"""From deltas to `RequestOutput`: accumulates text, ids and logprobs of a request's sequences.

A sink of router.py. Not here: detokenization and stop strings (Rust, `OutputProcessor`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal, get_args

from octavo._core import Delta, Tokenizer
from octavo.engine.request import EngineRequest
from octavo.errors import OctavoError, RequestError
from octavo.protocol import CompletionOutput, Logprob, RequestMetrics, RequestOutput

Mode = Literal["delta", "cumulative", "final"]
"""What each `RequestOutput` holds: what is new, all so far, or all once it is complete."""

RankedLogprobs = tuple[int, list[tuple[int, float]]]
"""(rank of the token, [(token id, logprob), …]): the token itself first, then the most probable ones in order."""


def check_mode(mode: str) -> None:
    if mode not in get_args(Mode):
        raise RequestError(f"stream must be one of {', '.join(get_args(Mode))}, got {mode!r}", "stream")


class OutputBuilder:
    """What one request has produced."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        request: EngineRequest,
        tokenizer: Tokenizer | None,
        mode: Mode = "final",
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self.request = request
        self._tokenizer = tokenizer
        self._is_delta = mode == "delta"
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._metrics = RequestMetrics(arrival_s=time.monotonic())
        self._outputs = [self._blank(index) for index in range(request.params.n)]
        self._touched: set[int] = set()
        self._num_running = request.params.n
        self._num_unstarted = request.params.n
        self.error: OctavoError | None = None

    @property
    def finished(self) -> bool:
        """All sequences have ended."""
        return self._num_running == 0

    def _blank(self, index: int) -> CompletionOutput:
        wants = self.request.params.logprobs is not None
        return CompletionOutput(index, logprobs=[] if wants else None, cumulative_logprob=0.0 if wants else None)

    def push(self, delta: Delta) -> None:
        """Add what one sequence gained. Runs once per sequence and step: rare fields are read only when due."""
        output = self._outputs[delta.index]
        output.text += delta.text
        output.token_ids += delta.token_ids
        if self._num_unstarted:
            self._begin(delta)
        if output.logprobs is not None:
            self._add_logprobs(output, delta)
        if self._is_delta:
            self._touched.add(delta.index)
        if delta.finish_reason is not None:
            output.finish_reason = delta.finish_reason
            output.stop_reason = delta.stop_reason
            self._num_running -= 1
            if self._num_running == 0:
                self._metrics.finished_s = time.monotonic() - self._metrics.arrival_s

    def _begin(self, delta: Delta) -> None:
        """What comes with the first delta of a sequence, or of the request."""
        metrics = self._metrics
        if metrics.first_token_s is None and delta.token_ids:
            metrics.first_token_s = time.monotonic() - metrics.arrival_s
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *(self._logprobs(entry) for entry in delta.prompt_logprobs)]
        if delta.index == 0 and delta.num_cached_tokens is not None:
            self._num_cached_tokens = delta.num_cached_tokens
        if delta.queue_s is not None:
            metrics.queue_s = delta.queue_s if metrics.queue_s is None else min(metrics.queue_s, delta.queue_s)
            self._num_unstarted -= 1

    def _add_logprobs(self, output: CompletionOutput, delta: Delta) -> None:
        """Append one mapping a token, and add the chosen tokens' logprobs up."""
        rows = delta.logprobs
        if rows is not None and output.logprobs is not None and output.cumulative_logprob is not None:
            output.logprobs += [self._logprobs(row) for row in rows]
            output.cumulative_logprob += sum(entries[0][1] for _, entries in rows)

    def finish(self, error: OctavoError | None) -> None:
        self.error = error

    def take(self) -> RequestOutput:
        """The sequences that gained something since the last call (delta), or copies of all of them."""
        if self._is_delta:
            outputs = [self._outputs[index] for index in sorted(self._touched)]
            for old in outputs:
                fresh = self._blank(old.index)
                fresh.cumulative_logprob = old.cumulative_logprob
                self._outputs[old.index] = fresh
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        else:
            outputs = [
                replace(o, token_ids=list(o.token_ids), logprobs=None if o.logprobs is None else list(o.logprobs))
                for o in self._outputs
            ]
            prompt_logprobs = self._prompt_logprobs
        self._touched.clear()
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            metrics=self._metrics,
        )

    def _logprobs(self, ranked: RankedLogprobs) -> dict[int, Logprob]:
        """One position's mapping: the token itself first, then the top ones that are not it."""
        rank, entries = ranked
        chosen_id, chosen = entries[0]
        found = {chosen_id: Logprob(chosen, rank, self._token_text(chosen_id))}
        for top_rank, (token_id, logprob) in enumerate(entries[1:], start=1):
            if token_id != chosen_id:
                found[token_id] = Logprob(logprob, top_rank, self._token_text(token_id))
        return found

    def _token_text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
