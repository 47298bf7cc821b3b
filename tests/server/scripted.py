"""Turns that say what a test scripts, below every API shape: the engine and the parsers are left out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from octavo.server.events import ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart, TurnEnd, TurnEvent
from octavo.server.turn import Turn

Script = Sequence[TurnEvent | Exception]
"""What a turn yields, or raises."""


class Scripted:
    """Replaces `Turn.events`: each turn takes the next script (the last one stays), one event a batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scripts: list[Script] = []
        self.turns: list[Turn] = []
        self.usage: dict[str, Any] = {
            "prompt_tokens": 20,
            "completion_tokens": 7,
            "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        scripted = self

        async def events(turn: Turn) -> AsyncIterator[list[TurnEvent]]:
            scripted.turns.append(turn)
            script = scripted.scripts[min(len(scripted.turns), len(scripted.scripts)) - 1]
            for event in script:
                if isinstance(event, Exception):
                    raise event
                yield [event]

        monkeypatch.setattr(Turn, "events", events)
        monkeypatch.setattr(Turn, "usage", lambda turn: scripted.usage)

    def say(self, *scripts: Script) -> None:
        self.scripts = list(scripts)


def text(*pieces: str, finish: str = "stop", stop_reason: int | str | None = None) -> list[TurnEvent]:
    return [*(ContentDelta(0, piece) for piece in pieces), TurnEnd(0, finish, stop_reason)]


def thought(*pieces: str) -> list[TurnEvent]:
    return [ReasoningDelta(0, piece) for piece in pieces]


def call(number: int, name: str, *pieces: str, id: str | None = None) -> list[TurnEvent]:
    start = ToolCallStart(0, number, id or f"call_{number}", name)
    return [start, *(ToolCallDelta(0, number, piece) for piece in pieces)]


CALLED: list[TurnEvent] = [TurnEnd(0, "tool_calls")]
