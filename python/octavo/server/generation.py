"""One HTTP call's work in the engine: its prompts' streams as one, with the counts and times that answers need.

Not here: HTTP bodies (schema/) and the shape of answers (chunks.py, full.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo._core import Delta
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError, UnavailableError
from octavo.server.tenants import caller

if TYPE_CHECKING:
    from octavo.engine.streams import Stream
    from octavo.server.context import ServerContext

log = logging.getLogger("octavo.server")

Batch = tuple[int, list[Delta]]
"""(number of the prompt, deltas); a delta's choice is prompt * n + its index."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids, and the text they came from (None for a prompt given as ids)."""

    token_ids: list[int]
    text: str | None


class Generation:
    """Submits on construction; iterate `batches` once, and `close` always.

    Raises:
        RequestError: A prompt does not fit the model; nothing was submitted then.
        UnavailableError: The server drains.
    """

    def __init__(
        self,
        context: ServerContext,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        if context.draining:
            raise UnavailableError("the server is shutting down")
        self.prompts = prompts
        self.n = params.n
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self._metrics = context.metrics
        self._logs = context.config.log_requests
        self._live = context.live
        self._arrival_s = time.perf_counter()
        self._caller = caller.current()
        self._tenant = self._caller.tenant
        self._last_s = 0.0
        self._task = asyncio.current_task()
        self._cut: ApiError | None = None
        self._streams: list[Stream] = []
        params = self._tenant.limit_params(params)
        try:
            for prompt in prompts:
                stream = context.llm.submit(
                    prompt.token_ids,
                    params,
                    priority=self._tenant.limit_priority(priority),
                    cache_salt=cache_salt or "",
                    tenant=self._tenant.wire_id,
                    weight=self._tenant.spec.weight,
                )
                self._streams.append(stream)
                self._tenant.count_prompt(len(prompt.token_ids))
        except BaseException:
            self.close()
            raise
        self._live.add(self)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def usage(self, *, num_output_tokens: int | None = None) -> dict[str, Any]:
        """OpenAI's usage object, for what has come so far."""
        completion = self.num_output_tokens if num_output_tokens is None else num_output_tokens
        prompt = self.num_prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    async def batches(self) -> AsyncIterator[Batch]:
        """What the engine brings, as it comes; ends when all sequences have ended. Raises what the streams raise."""
        try:
            if len(self._streams) == 1:
                async for deltas in self._streams[0]:
                    self._count(deltas)
                    yield 0, deltas
            else:
                async for batch in self._merged():
                    self._count(batch[1])
                    yield batch
        except asyncio.CancelledError:
            if self._cut is None:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
            raise self._cut from None
        self._metrics.count_call(self._arrival_s, self.num_prompt_tokens)
        if self._logs:
            log.info(
                "%d sequences: %d prompt tokens (%d cached), %d output tokens in %.3f s",
                self.num_choices,
                self.num_prompt_tokens,
                self.num_cached_tokens,
                self.num_output_tokens,
                time.perf_counter() - self._arrival_s,
            )

    async def _merged(self) -> AsyncIterator[Batch]:
        """Batches of several streams in the order of arrival."""
        queue: asyncio.Queue[Batch | BaseException | None] = asyncio.Queue()

        async def read(number: int, stream: Stream) -> None:
            try:
                async for deltas in stream:
                    queue.put_nowait((number, deltas))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        readers = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(self._streams)]
        try:
            open_readers = len(readers)
            while open_readers:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    open_readers -= 1
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()

    def _count(self, deltas: list[Delta]) -> None:
        now_s = time.perf_counter()
        if self._last_s:
            self._metrics.inter_token_s.observe(now_s - self._last_s)
        else:
            self._metrics.first_token_s.observe(now_s - self._arrival_s)
            self._caller.first_token_s = now_s - self._caller.arrival_s
        self._last_s = now_s
        before = self.num_output_tokens
        for delta in deltas:
            self.num_output_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                if delta.finish_reason == "error":
                    raise ApiError(500, "the engine could not finish this request", kind="internal_error")
                self._metrics.finished(delta.finish_reason)
            if delta.num_cached_tokens is not None and delta.index == 0:
                self.num_cached_tokens += delta.num_cached_tokens
                self._tenant.usage.num_cached_tokens += delta.num_cached_tokens
            if delta.queue_s is not None:
                self._metrics.queue_s.observe(delta.queue_s)
                self._caller.queue_s = max(self._caller.queue_s or 0.0, delta.queue_s)
        self._tenant.count_output(self.num_output_tokens - before)

    def cut(self, error: ApiError) -> None:
        """End the call from outside: its client gets `error`."""
        self._cut = error
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Abort what still runs."""
        self._live.discard(self)
        for stream in self._streams:
            stream.close()
