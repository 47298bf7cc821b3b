"""A tenant at run time: what it may still use, and what it has used.

Not here: what a keys file says (spec.py); the engine's turns between tenants (rust/core/src/tenants.rs).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError
from octavo.server.tenants.bucket import Bucket
from octavo.server.tenants.spec import TenantSpec

Clock = Callable[[], float]
EVERYBODY = TenantSpec(keys=[])
"""Of a server without a keys file: no limits."""


@dataclass(slots=True)
class Usage:
    """Counts since the start of the server."""

    num_calls: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By the limit that was reached: "requests", "tokens", "concurrent"."""


class Tenant:
    """Counts and limits of one tenant; everything runs in the event loop's thread."""

    def __init__(self, name: str, spec: TenantSpec = EVERYBODY, clock: Clock = time.monotonic) -> None:
        self.name = name
        self.usage = Usage()
        self.num_live = 0
        """Calls in flight, those that go on in the background among them (`Caller`)."""
        self._clock = clock
        self.apply(spec)

    def apply(self, spec: TenantSpec) -> None:
        """Take new limits; what has been used stays used unless a rate changes."""
        old = getattr(self, "spec", None)
        self.spec = spec
        if old is None or old.requests_per_minute != spec.requests_per_minute:
            rate = spec.requests_per_minute
            self.requests = None if rate is None else Bucket(rate, self._clock)
        if old is None or old.tokens_per_minute != spec.tokens_per_minute:
            rate = spec.tokens_per_minute
            self.tokens = None if rate is None else Bucket(rate, self._clock)

    @property
    def wire_id(self) -> int:
        """The number that the engine knows the tenant by, the same in every API process; 0 without a keys file."""
        if self.spec is EVERYBODY:
            return 0
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little") or 1

    def enter(self) -> None:
        """A call arrives. `ApiError` (429) when a limit is reached."""
        if self.requests is not None and self.requests.level < 1:
            raise self._refusal("requests", self.requests.wait_s(1), f"{self.requests.per_minute} requests a minute")
        if self.tokens is not None and self.tokens.level < 1:
            raise self._refusal("tokens", self.tokens.wait_s(1), f"{self.tokens.per_minute} tokens a minute")
        limit = self.spec.max_concurrent
        if limit is not None and self.num_live >= limit:
            raise self._refusal("concurrent", 1.0, f"{limit} calls at a time")
        if self.requests is not None:
            self.requests.take(1)
        self.usage.num_calls += 1

    def _refusal(self, what: str, wait_s: float, limit: str) -> ApiError:
        self.usage.refused[what] += 1
        return ApiError(
            429,
            f"the limit of this key's tenant is reached: {limit}; try again in {max(wait_s, 0.001):.3g} s",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(max(1, round(wait_s + 0.5)))},
        )

    def limit_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters within `max_tokens`. `RequestError` when they ask for more; never less than asked for."""
        most = self.spec.max_tokens
        if most is None or (params.max_tokens is not None and params.max_tokens <= most):
            return params
        if params.max_tokens is not None or params.min_tokens > most:
            raise RequestError(f"max_tokens may be at most {most} with this key", "max_tokens")
        return replace(params, max_tokens=most)

    def limit_priority(self, priority: int) -> int:
        """The priority, no more urgent than the tenant may claim."""
        return priority if self.spec.priority is None else max(priority, self.spec.priority)

    def count_prompt(self, num_tokens: int) -> None:
        """A prompt was submitted."""
        self.usage.num_prompt_tokens += num_tokens
        if self.tokens is not None:
            self.tokens.take(num_tokens)

    def count_output(self, num_tokens: int) -> None:
        """Tokens were generated."""
        self.usage.num_output_tokens += num_tokens
        if self.tokens is not None:
            self.tokens.take(num_tokens)

    def headers(self, *, anthropic: bool = False) -> list[tuple[bytes, bytes]]:
        """What is left, as OpenAI or Anthropic tells it."""
        told: list[tuple[bytes, bytes]] = []
        for what, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                told += bucket.anthropic_headers(what) if anthropic else bucket.headers(what)
        return told
