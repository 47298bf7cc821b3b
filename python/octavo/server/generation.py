"""One HTTP call's work in the engine: its prompts' streams as one, with the counts and times that answers need.

Not here: HTTP bodies (schema/) and the shape of answers (chunks.py, full.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo._core import Delta
from octavo.sampling_params import SamplingParams
from octavo.server.call_record import ABORTED, CallRecord, outcome_of
from octavo.server.errors import ApiError, UnavailableError
from octavo.server.tenants import caller

if TYPE_CHECKING:
    from octavo.engine.streams import Stream
    from octavo.server.context import ServerContext

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
        self._live = context.live
        tenant = caller.current().tenant
        params = tenant.limit_params(params)
        self.record = CallRecord(context, prompts, params)
        self._task = asyncio.current_task()
        self._cut: ApiError | None = None
        self._streams: list[Stream] = []
        try:
            for prompt in prompts:
                stream = context.llm.submit(
                    prompt.token_ids,
                    params,
                    priority=tenant.limit_priority(priority),
                    cache_salt=cache_salt or "",
                    tenant=tenant.wire_id,
                    weight=tenant.spec.weight,
                )
                self._streams.append(stream)
                tenant.count_prompt(len(prompt.token_ids))
        except BaseException as error:
            self.record.end(outcome_of(error))
            self.close()
            raise
        self._live.add(self)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return self.record.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """So far."""
        return self.record.num_output_tokens

    @property
    def num_cached_tokens(self) -> int:
        return self.record.num_cached_tokens

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
        record = self.record
        try:
            if len(self._streams) == 1:
                async for deltas in self._streams[0]:
                    record.count(deltas)
                    yield 0, deltas
            else:
                async for batch in self._merged():
                    record.count(batch[1])
                    yield batch
        except asyncio.CancelledError:
            if self._cut is None:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
            record.end(outcome_of(self._cut))
            raise self._cut from None
        except Exception as error:
            record.end(outcome_of(error))
            raise
        record.end("ok")

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
        self.record.end(ABORTED)
