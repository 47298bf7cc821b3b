"""One HTTP call's work in an engine that pools: the counterpart of generation.py, with the same limits and reports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.pooling.answers import Rows
from octavo.pooling.inputs import PoolingInput
from octavo.sampling_params import SamplingParams
from octavo.server.call_record import ABORTED, CallRecord, outcome_of
from octavo.server.errors import ApiError, UnavailableError
from octavo.server.prompt import Prompt
from octavo.server.sse import ClientGoneError, while_connected

if TYPE_CHECKING:
    from octavo.server.context import ServerContext

Usage = dict[str, int]


class PoolingCall:
    """Counted from construction on; await `run` once, and `close` always. UnavailableError while the server drains."""

    def __init__(self, context: ServerContext, inputs: Sequence[PoolingInput]) -> None:
        if context.draining:
            raise UnavailableError("the server is shutting down")
        self.record = CallRecord(context, [Prompt(one.token_ids, None) for one in inputs], SamplingParams())
        self.record.caller.hold()
        self._inputs = inputs
        self._context = context
        self._task = asyncio.current_task()
        self._cut: ApiError | None = None
        self._is_closed = False
        context.live.calls.add(self)

    @property
    def usage(self) -> Usage:
        """OpenAI's usage object: there is no output."""
        return {"prompt_tokens": self.record.num_prompt_tokens, "total_tokens": self.record.num_prompt_tokens}

    async def run(self) -> Rows:
        """[inputs, numbers]. Raises what the engine says, or what `cut` was given."""
        record = self.record
        tenant = record.caller.tenant
        for one in self._inputs:
            tenant.count_prompt(len(one.token_ids))
        # Work that nobody waits for at the other end of a connection may wait as long as it takes.
        deadline_s = self._context.config.max_queue_s if record.caller.counts else 0.0
        try:
            pooled = await self._context.llm.pool(self._inputs, deadline_s=deadline_s)
        except asyncio.CancelledError:
            if self._cut is None:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
            record.end(outcome_of(self._cut))
            raise self._cut from None
        except Exception as error:
            self._context.overload.note(record.caller, error)
            record.end(outcome_of(error))
            raise
        record.begun(pooled.queue_s)
        for _ in self._inputs:
            record.finish("stop")
        record.end("ok")
        return pooled.rows

    def cut(self, error: ApiError) -> None:
        """End the call from outside: its client gets `error`."""
        self._cut = error
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """The call is over, whatever became of it."""
        if not self._is_closed:
            self._is_closed = True
            self.record.caller.release()
            self._context.live.calls.discard(self)
            self.record.end(ABORTED)


async def answer(
    request: Request,
    context: ServerContext,
    inputs: Sequence[PoolingInput],
    write: Callable[[Rows, Usage], dict[str, Any]],
) -> Response:
    """Run inputs and write the body; what was not run is dropped when the client leaves."""
    call = PoolingCall(context, inputs)
    try:
        rows = await while_connected(request.receive, call.run())
    except ClientGoneError:
        return Response(status_code=499)
    finally:
        call.close()
    body = await context.run_text(lambda: json.dumps(write(rows, call.usage)), size_bytes=rows.nbytes)
    return Response(body, media_type="application/json")


def id_of(request: Request, kind: str) -> str:
    """The answer's id, by which an operator finds the call."""
    return f"{kind}-{request.state.request_id}"
