"""A token bucket: an average rate, with a minute's worth at once. It may go into debt, which time pays off."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta


class Bucket:
    """Full at first. `clock` gives seconds that never go back."""

    __slots__ = ("_clock", "_level", "_time_s", "per_minute")

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._time_s = clock()

    @property
    def level(self) -> float:
        """What may be taken now; negative in debt."""
        now_s = self._clock()
        self._level = min(self.per_minute, self._level + (now_s - self._time_s) * self.per_minute / 60)
        self._time_s = now_s
        return self._level

    def take(self, amount: float) -> None:
        """Take, whatever there is."""
        self._level = self.level - amount

    def wait_s(self, level: float) -> float:
        """Seconds until there is as much as `level` (at most the whole bucket)."""
        missing = min(level, self.per_minute) - self.level
        return max(0.0, missing * 60 / self.per_minute)

    def headers(self, what: str) -> list[tuple[bytes, bytes]]:
        """The limit, what is left and when it is full again, as OpenAI's `x-ratelimit-*` headers."""
        values = {**self._values(), "reset": f"{self.wait_s(self.per_minute):.3f}s"}
        return [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in values.items()]

    def anthropic_headers(self, what: str) -> list[tuple[bytes, bytes]]:
        """The same as Anthropic's `anthropic-ratelimit-*` headers, which give a time in RFC 3339."""
        full = datetime.now(UTC) + timedelta(seconds=self.wait_s(self.per_minute))
        values = {**self._values(), "reset": full.strftime("%Y-%m-%dT%H:%M:%SZ")}
        return [(f"anthropic-ratelimit-{what}-{name}".encode(), value.encode()) for name, value in values.items()]

    def _values(self) -> dict[str, str]:
        return {"limit": str(self.per_minute), "remaining": str(max(0, math.floor(self.level)))}
