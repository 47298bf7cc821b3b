"""The calls in flight, and how they are ended from outside: by a drain, or by an operator.

What calls do is elsewhere (generation.py, pooling_call.py, responses/run.py): here each has a record and can be cut.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from octavo.server.errors import ApiError
from octavo.server.tenants.caller import Caller

log = logging.getLogger("octavo.server")

LOOK_S = 0.05


class Record(Protocol):
    """What a call's record tells of it."""

    caller: Caller
    arrival_s: float

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...


class Call(Protocol):
    """Work in the engine for one call."""

    @property
    def record(self) -> Record: ...

    def cut(self, error: ApiError) -> None:
        """End it: its client gets `error`."""


class Run(Protocol):
    """A response of several turns. Before the first and between two, while tool servers are asked, it has no call in
    the engine."""

    request_id: str

    @property
    def is_between_turns(self) -> bool: ...

    def cut(self, error: ApiError) -> None:
        """End it between two turns: its reader gets `error`."""


class LiveCalls:
    """Calls and runs put themselves in and take themselves out."""

    def __init__(self) -> None:
        self.calls: set[Call] = set()
        self.runs: set[Run] = set()

    def __len__(self) -> int:
        """Calls that the model or a tool works for."""
        return len(self.calls) + len(self._waiting())

    def _waiting(self) -> list[Run]:
        return [run for run in self.runs if run.is_between_turns]

    async def wait(self, timeout_s: float) -> None:
        """Return when all have ended, or when the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while (self.calls or self.runs) and time.monotonic() < deadline_s:
            await asyncio.sleep(LOOK_S)

    def cut_all(self, error: ApiError) -> int:
        """End all that are left, each of them once; how many those were."""
        waiting, calls = self._waiting(), list(self.calls)
        self.runs.difference_update(waiting)
        self.calls.clear()
        for run in waiting:
            log.warning("cut: %s while a tool worked", run.request_id or "a response")
            run.cut(error)
        for call in calls:
            record = call.record
            log.warning("cut: %s after %d tokens", record.caller.request_id or "a call", record.num_output_tokens)
            call.cut(error)
        return len(calls) + len(waiting)

    def cut_one(self, request_id: str, error: ApiError) -> int:
        """End calls by their id (`x-request-id`), or by the id of their answer, which ends with it; how many."""
        ids = {call: call.record.caller.request_id for call in self.calls}
        exact = [call for call, own in ids.items() if own == request_id]
        calls = exact or [call for call, own in ids.items() if own and request_id.endswith(("-" + own, "_" + own))]
        waiting = [run for run in self._waiting() if run.request_id == request_id]
        for call in calls:
            call.cut(error)
        for run in waiting:
            run.cut(error)
        return len(calls) + len(waiting)
