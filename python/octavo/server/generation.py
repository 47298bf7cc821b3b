"""One HTTP call's work in the engine: its prompts' streams as one, with the counts and times that answers need.

Not here: HTTP bodies (schema/) and the shape of answers (chunks.py, full.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo._core import Delta
from octavo.engine.request import Terms
from octavo.sampling_params import SamplingParams
from octavo.server.call_record import ABORTED, CallRecord, outcome_of
from octavo.server.errors import ApiError, UnavailableError
from octavo.server.prompt import Prompt
from octavo.server.tenants import caller

if TYPE_CHECKING:
    from octavo.engine.streams import Stream
    from octavo.server.context import ServerContext

Batch = tuple[int, list[Delta]]
"""(number of the prompt, deltas); a delta's choice is prompt * n + its index."""


class Generation:
    """Submits on construction; iterate `batches` once, and `close` always.

    Args:
        goes_on: It goes on with work that was admitted before: a server that drains takes it.

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
        goes_on: bool = False,
    ) -> None:
        if context.draining and not goes_on:
            raise UnavailableError("the server is shutting down")
        self.prompts = prompts
        self.n = params.n
        self._live = context.live.calls
        tenant = caller.current().tenant
        params = tenant.limit_params(params)
        asked = [prompt for prompt in prompts if not prompt.first_choice]
        self.record = CallRecord(context, asked, replace(params, n=params.n * len(prompts) // len(asked)))
        self.record.caller.hold()
        self._is_closed = False
        self._cut: ApiError | None = None
        self._streams: list[Stream] = []
        self._replaced: set[int] = set()
        self._arrived: asyncio.Queue[tuple[int, Stream, list[Delta] | Exception | None]] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []
        """Tasks that fill `_arrived`, when there are several streams."""
        self._llm, self._overload = context.llm, context.overload
        self._tenant = tenant
        self._terms = Terms(
            tenant.limit_priority(priority),
            cache_salt or "",
            # Work that nobody waits for at the other end of a connection may wait as long as it takes.
            deadline_s=context.config.max_queue_s if self.record.caller.counts else 0.0,
            tenant=tenant.wire_id,
            weight=tenant.spec.weight,
        )
        try:
            for prompt in prompts:
                self._streams.append(self._submit(prompt, params))
            for prompt in asked:
                tenant.count_prompt(len(prompt.token_ids))
        except BaseException as error:
            self.record.end(outcome_of(error))
            self.close()
            raise
        self._live.add(self)

    def _submit(self, prompt: Prompt, params: SamplingParams) -> Stream:
        return self._llm.submit(
            prompt.token_ids, params, terms=self._terms, first_choice=prompt.first_choice, media=prompt.media
        )

    def replace(self, number: int, prompt: Prompt, params: SamplingParams) -> None:
        """End the stream of a prompt; what comes under its number from now on is another one's."""
        if self._cut is not None:
            raise self._cut
        old = self._streams[number]
        self._replaced.add(number)
        self._streams[number] = self._submit(prompt, self._tenant.limit_params(params))
        old.close()
        if self._readers:
            self._start_reader(number)

    def end(self, number: int) -> None:
        """End the stream of a prompt, whose sequence is complete for its reader."""
        self._streams[number].close()
        self.record.finish("stop")

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
                stream = None
                while stream is not self._streams[0]:
                    stream = self._streams[0]
                    async for deltas in stream:
                        self._count(0, deltas)
                        yield 0, deltas
            else:
                async for batch in self._merged():
                    self._count(*batch)
                    yield batch
        except Exception as error:
            self._overload.note(record.caller, error)
            record.end(outcome_of(error))
            raise
        record.end("ok")

    def _count(self, number: int, deltas: list[Delta]) -> None:
        """Note a batch; a prompt counts once, however often it was submitted."""
        is_first = number not in self._replaced and not self.prompts[number].first_choice
        self.record.count(deltas, counts_prompt=is_first)

    async def _merged(self) -> AsyncIterator[Batch]:
        """Batches of several streams in the order of arrival; streams that are replaced meanwhile are let go."""
        try:
            for number in range(len(self._streams)):
                self._start_reader(number)
            num_open = len(self._streams)
            while num_open:
                number, stream, item = await self._arrived.get()
                if stream is not self._streams[number]:
                    continue
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield number, item
        finally:
            for reader in self._readers:
                reader.cancel()

    def _start_reader(self, number: int) -> None:
        """Bring what a stream gives into `_arrived`."""
        stream, arrived = self._streams[number], self._arrived

        async def read() -> None:
            try:
                async for deltas in stream:
                    arrived.put_nowait((number, stream, deltas))
                arrived.put_nowait((number, stream, None))
            except Exception as error:
                arrived.put_nowait((number, stream, error))

        self._readers.append(asyncio.create_task(read()))

    def cut(self, error: ApiError) -> None:
        """End the call from outside: its client gets `error`, whether it waits for the engine or takes its time to
        read."""
        self._cut = error
        self._live.discard(self)
        self.record.end(outcome_of(error))
        for stream in self._streams:
            stream.fail(error)

    def close(self) -> None:
        """Abort what still runs."""
        if self._is_closed:
            return
        self._is_closed = True
        self.record.caller.release()
        self._live.discard(self)
        for stream in self._streams:
            stream.close()
        self.record.end(ABORTED)
