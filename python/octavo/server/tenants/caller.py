"""The caller of the HTTP call in progress: its tenant, its request id, and times that the answer's headers tell.

The gate sets it; whatever runs for the call (in its task, or in tasks that it starts) finds it without being handed it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from octavo.server.tenants.keyring import DEFAULT
from octavo.server.tenants.tenant import Tenant


@dataclass(slots=True)
class Caller:
    """One call. Times in seconds; `arrival_s` is of `time.perf_counter`, the others count from it."""

    tenant: Tenant
    request_id: str = ""
    traceparent: str | None = None
    size_bytes: int = 0
    """Of the body, once it is read."""
    arrival_s: float = field(default_factory=time.perf_counter)
    queue_s: float | None = None
    first_token_s: float | None = None
    counts: bool = False
    """Whether the call is one of its tenant's calls in flight."""
    _num_holds: int = 0

    def hold(self) -> None:
        """The call goes on until `release`: its answer, or work of it that outlives the answer."""
        self._num_holds += 1
        if self.counts and self._num_holds == 1:
            self.tenant.num_live += 1

    def release(self) -> None:
        self._num_holds -= 1
        if self.counts and self._num_holds == 0:
            self.tenant.num_live -= 1

    def timing_headers(self) -> list[tuple[bytes, bytes]]:
        """What is known when the answer begins: a stream begins with its first token, other answers at their end."""
        if self.first_token_s is None:
            return []
        values = {
            b"x-octavo-queue-ms": self.queue_s,
            b"x-octavo-first-token-ms": self.first_token_s,
            b"openai-processing-ms": time.perf_counter() - self.arrival_s,
        }
        return [(name, b"%.1f" % (1e3 * value)) for name, value in values.items() if value is not None]


_CALLER: ContextVar[Caller] = ContextVar("octavo_caller")
_NOBODY = Tenant(DEFAULT)


def current() -> Caller:
    """The caller; outside of a call somebody without limits."""
    return _CALLER.get(None) or Caller(_NOBODY)


@contextmanager
def calling(caller: Caller) -> Iterator[None]:
    """Within the block this is the caller."""
    token = _CALLER.set(caller)
    try:
        yield
    finally:
        _CALLER.reset(token)
