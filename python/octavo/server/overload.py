"""Refuses calls that the engine's full queue would refuse, before their text is rendered and tokenized.

The engine decides who may wait (rust/core/src/queue_load.rs). Two things are known here without asking it: how many
requests it has at least, and what it refused a moment ago. Not here: limits of tenants (tenants/).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import DeadlineError, OverloadError
from octavo.server.tenants.caller import Caller

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

# How long a refusal speaks for calls that come after it; then one of them asks again.
MEMORY_S = 0.25


@dataclass(frozen=True, slots=True)
class Refused:
    """The newest refusal of a tenant: when it was, of how large a body, how many requests waited then."""

    at_s: float
    size_bytes: int
    num_waiting: int
    retry_after_s: float


class Overload:
    """What is known of the queue."""

    def __init__(self, llm: AsyncLLM, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_refused = 0
        """Calls that the engine did not hear of."""
        self._llm = llm
        self._clock = clock
        self._refused: dict[str, Refused] = {}

    def check(self, caller: Caller, size_bytes: int) -> None:
        """Raise `OverloadError` when a call with a body of this size would be refused. For calls of a client, not for
        work that was admitted before."""
        caller.size_bytes = size_bytes
        refused = self._refused.get(caller.tenant.name)
        if self._is_full or (refused is not None and self._holds(refused, size_bytes)):
            self.num_refused += 1
            retry_after_s = refused.retry_after_s if refused is not None else 1.0
            most = self._llm.config.scheduler.max_queued_requests
            raise OverloadError(
                f"too many requests wait (--max-queued-requests {most}); try again later", retry_after_s
            )

    def added_to(self, stats: Mapping[str, float]) -> dict[str, float]:
        """The engine's numbers, with what only is known here."""
        most = self._llm.config.scheduler.max_queued_requests
        return {**stats, "num_refused": stats.get("num_refused", 0) + self.num_refused, "max_waiting": most}

    @property
    def _is_full(self) -> bool:
        """There are more requests than can run and wait."""
        facts = self._llm.facts
        assert facts is not None, "calls are taken when the engine is ready"
        return self._llm.num_requests >= facts.max_num_seqs + self._llm.config.scheduler.max_queued_requests

    def _holds(self, refused: Refused, size_bytes: int) -> bool:
        is_new = self._clock() - refused.at_s < MEMORY_S
        return is_new and size_bytes >= refused.size_bytes and self._num_waiting >= refused.num_waiting

    @property
    def _num_waiting(self) -> int:
        stats = self._llm.stats
        return 0 if stats is None else stats.num_waiting

    def note(self, caller: Caller, error: BaseException) -> None:
        """How the engine ended a call."""
        if isinstance(error, OverloadError) and not isinstance(error, DeadlineError):
            refused = Refused(self._clock(), caller.size_bytes, self._num_waiting, error.retry_after_s)
            self._refused[caller.tenant.name] = refused
