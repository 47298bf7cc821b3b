"""Where the time to the first token of each request went: what a client saw (serve.py) beside what the server logged.

The server's line of a finished call (`octavo serve --log-requests --log-format json`) has, from the call's arrival
there, the time in the engine's queue and the time to the first token; a request's id joins the two. What is left is the
way: sockets, JSON and tokens of the prompt before, the first piece of the answer behind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SLOWEST = 12
"""Requests that are listed one by one."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as its client saw it; seconds from the load's beginning."""

    request_id: str
    due_s: float
    """By the clock of arrivals."""
    sent_s: float
    first_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """A request; milliseconds, but for `due_s` (from the load's beginning) and counts."""

    request_id: str
    due_s: float
    late: float
    """Sent so long after it was due."""
    way: float
    """To the server and back, and the server's own work before it counts the call."""
    queue: float
    """In the engine's queue: from the plan that found it there to the plan of the first step that has some of its
    tokens."""
    prompt: float
    """The rest, up to the first token at the API: until a plan is made, and the steps with its prompt."""
    ttft: float
    """As the client saw it, from sending."""
    num_waiting: int
    """Others that were sent and had no token yet."""
    num_decoding: int
    """Others that had, and had not ended."""


def read_log(path: Path) -> dict[str, dict[str, float]]:
    """Request id -> the times of its line."""
    calls = {}
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            fields = json.loads(line)
            if fields.get("first_token_s") is not None and "queue_s" in fields:
                calls[str(fields["request_id"])] = fields
    return calls


def join(seen: Sequence[Seen], ends_s: Sequence[float], log: Path) -> list[Entry]:
    """Requests that both sides know, by time of arrival."""
    calls = read_log(log)
    entries = []
    for one in seen:
        call = calls.get(one.request_id)
        if call is None:
            continue
        others = [(other, end_s) for other, end_s in zip(seen, ends_s, strict=True) if other is not one]
        ttft = 1e3 * (one.first_s - one.sent_s)
        queue, first = 1e3 * (call["queue_s"] or 0.0), 1e3 * call["first_token_s"]
        entries.append(
            Entry(
                one.request_id,
                one.due_s,
                late=1e3 * (one.sent_s - one.due_s),
                way=ttft - first,
                queue=queue,
                prompt=first - queue,
                ttft=ttft,
                num_waiting=sum(other.sent_s <= one.sent_s < other.first_s for other, _ in others),
                num_decoding=sum(other.first_s <= one.sent_s < end_s for other, end_s in others),
            )
        )
    return sorted(entries, key=lambda entry: entry.due_s)


def show(entries: Sequence[Entry]) -> str:
    """Percentiles of each part, and the slowest requests."""
    if not entries:
        return "timeline: no request is in both the client's and the server's records"
    parts = ("ttft", "late", "way", "queue", "prompt")
    lines = [f"{'timeline, ms':<14}" + "".join(f"{part:>9}" for part in parts)]
    for percent in (50, 90, 99, 100):
        values = []
        for part in parts:
            ordered = sorted(getattr(entry, part) for entry in entries)
            values.append(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)])
        lines.append(f"{f'p{percent}':<14}" + "".join(f"{value:>9.2f}" for value in values))
    lines.append(f"{'slowest, at s':<14}" + "".join(f"{part:>9}" for part in parts) + "  waiting decoding")
    for entry in sorted(entries, key=lambda entry: -entry.ttft)[:SLOWEST]:
        row = "".join(f"{getattr(entry, part):>9.2f}" for part in parts)
        lines.append(f"{entry.due_s:<14.3f}{row}{entry.num_waiting:>9}{entry.num_decoding:>9}")
    return "\n".join(lines)
