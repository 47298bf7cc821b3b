"""What is kept of responses: bounded by count and bytes, the oldest finished ones go first. In memory, per process.

A background response is here from its start, with the log of its events, which any number of clients may follow.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from octavo.server.errors import ApiError


class EventLog:
    """Events of a response as they come, for followers that may come later."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[str] = []
        self._closed = False
        self._changed = asyncio.Event()

    def add(self, event: str) -> None:
        self._events.append(event)
        self.num_bytes += len(event)
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, after: int) -> AsyncIterator[str]:
        """Events whose sequence number is above `after`, then those to come."""
        at = max(0, after + 1)
        while True:
            if at < len(self._events):
                yield "".join(self._events[at:])
                at = len(self._events)
            elif self._closed:
                return
            else:
                await self._changed.wait()


@dataclass(slots=True)
class Kept:
    """One response, its whole input (with that of the responses before it), and, in the background, its work."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    owner: str
    log: EventLog | None = None
    task: asyncio.Task[None] | None = None
    num_bytes: int = field(default=0)

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    def measure(self) -> int:
        """Bytes that it holds, as JSON; shared input counts for each that holds it."""
        log = self.log.num_bytes if self.log is not None else 0
        return log + len(json.dumps(self.response)) + len(json.dumps(self.input_items))


class ResponseStore:
    """Kept responses by id.

    Args:
        max_count: 0 keeps nothing.
        max_bytes: Over all of them; a running response counts when it has ended.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._kept: dict[str, Kept] = {}
        self._num_bytes = 0

    @property
    def on(self) -> bool:
        return self._max_count > 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, kept: Kept) -> None:
        """Keep a response that begins. 429 when nothing may go because all others still run."""
        self._evict(1)
        if len(self._kept) >= self._max_count:
            raise ApiError(
                429,
                f"{self._max_count} background responses run already (--responses-store)",
                kind="rate_limit_error",
                code="too_many_responses",
                headers={"Retry-After": "5"},
            )
        self._kept[kept.response["id"]] = kept
        self.settle(kept)

    def offer(self, kept: Kept) -> None:
        """Keep a response that has ended, if there is room for it beside those that run."""
        self._evict(1)
        if len(self._kept) < self._max_count:
            self._kept[kept.response["id"]] = kept
            self.settle(kept)

    def settle(self, kept: Kept) -> None:
        """Count a response anew, after it has grown."""
        if self._kept.get(kept.response["id"]) is not kept:
            return
        self._num_bytes -= kept.num_bytes
        kept.num_bytes = kept.measure()
        self._num_bytes += kept.num_bytes
        self._evict(0)

    def _evict(self, room: int) -> None:
        """Drop the oldest finished until the bounds hold with `room` more."""
        for name in list(self._kept):
            if len(self._kept) + room <= self._max_count and self._num_bytes <= self._max_bytes:
                return
            if not self._kept[name].running:
                self._drop(name)

    def _drop(self, name: str) -> None:
        self._num_bytes -= self._kept.pop(name).num_bytes

    def get(self, name: str, owner: str) -> Kept:
        """A kept response; 404 for one that was never kept, is another's, or has gone."""
        kept = self._kept.get(name)
        if kept is None or kept.owner != owner:
            hint = "" if self.on else ": this server keeps none (start it with --responses-store N)"
            raise ApiError(404, f"no response {name[:80]!r} is kept{hint}", param="response_id", code="not_found")
        return kept

    def delete(self, name: str, owner: str) -> None:
        """Forget a response, and end it if it runs."""
        kept = self.get(name, owner)
        if kept.task is not None:
            kept.task.cancel()
        self._drop(name)
