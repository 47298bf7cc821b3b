"""What parsers find in a model's text: reasoning, content, and calls. And the one form that all parsers have.

Not here: the events of a whole turn (events.py), which carry choices, call numbers and ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Reasoning:
    """More of the reasoning."""

    text: str


@dataclass(slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(slots=True)
class CallStart:
    """A call of a tool begins; `id` is the model's own name of the call, when its format has one."""

    name: str
    id: str | None = None


@dataclass(slots=True)
class CallArguments:
    """More of the newest call's arguments, JSON."""

    text: str


Part = Reasoning | Content | CallStart | CallArguments


class Parser(Protocol):
    """Reads text as it comes. The parts, joined, don't depend on how the text was cut into pieces."""

    def feed(self, text: str) -> list[Part]:
        """More text: what is certain now."""
        ...

    def finish(self) -> list[Part]:
        """The text has ended: what was held back."""
        ...
