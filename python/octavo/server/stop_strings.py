"""Stop strings that count in the answer alone, not in reasoning or in calls: matched here, on the content.

Where a model neither reasons nor calls, the engine's side matches them (rust/core/src/stop.rs).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the earliest of some strings in text that comes in pieces.

    Attributes:
        found: The string that was found; nothing comes out after it.
    """

    def __init__(self, strings: Sequence[str], *, keep: bool) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, strings)) - 1
        self._keep = keep
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, counts: bool) -> str:
        """Text that is certain to stand before a stop string. What is complete while `counts` is not set is none."""
        text = self._held + text
        if self.found is not None or not text:
            return ""
        if counts and (end := self._first_end(text)) is not None:
            self.found = max((stop for stop in self._strings if text.endswith(stop, 0, end)), key=len)
            self._held = ""
            return text[: end if self._keep else end - len(self.found)]
        start = max(0, len(text) - self._longest) if self._longest else len(text)
        while start < len(text) and not self._may_go_on(text[start:]):
            start += 1
        self._held = text[start:]
        return text[:start]

    def _first_end(self, text: str) -> int | None:
        """Where the string that is complete first ends."""
        places = [(text.find(stop), len(stop)) for stop in self._strings]
        return min((at + length for at, length in places if at >= 0), default=None)

    def _may_go_on(self, tail: str) -> bool:
        return any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._strings)

    def finish(self) -> str:
        """What was held back."""
        text, self._held = self._held, ""
        return text
