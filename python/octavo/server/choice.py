"""One choice of a turn: its text through the parsers of reasoning and calls, as events.

Not here: where the text comes from and when the choice ends (turn.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.server.events import ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart, TurnEvent
from octavo.server.parts import CallArguments, CallStart, Content, Parser, Part, Reasoning
from octavo.server.reasoning.base import ReasoningParser
from octavo.server.stop_strings import StopStrings


class ChoiceReader:
    """Reads the text of a choice.

    Args:
        number: The choice.
        reasoning: None when the model does not reason.
        tools: None when no calls are wanted: what the reasoning's parser finds of them is content then.
        make_id: An id for a call that has none: (name, number of the call).
        stop: Stop strings of the content; None when the engine's side matches them.
        shows_reasoning: Else reasoning is left out.
        one_call: The choice is over when a second call begins.
    """

    def __init__(
        self,
        number: int,
        *,
        reasoning: ReasoningParser | None,
        tools: Parser | None,
        make_id: Callable[[str, int], str],
        stop: StopStrings | None,
        shows_reasoning: bool,
        one_call: bool,
    ) -> None:
        self._number = number
        self._reasoning = reasoning
        self._tools = tools
        self._make_id = make_id
        self._stop = stop
        self._shows_reasoning = shows_reasoning
        self._one_call = one_call
        self._counts = True
        self._has_arguments = False
        self._ids: set[str] = set()
        self._events: list[TurnEvent] = []
        self.num_calls = 0
        self.is_over = False
        """A stop string or a call too many has ended the choice: no more text is wanted."""

    @property
    def thinks(self) -> bool:
        """The text so far ends inside reasoning."""
        return self._reasoning is not None and self._reasoning.thinks

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the choice."""
        return self._stop.found if self._stop is not None else None

    def feed(self, text: str, *, stops_count: bool = True) -> list[TurnEvent]:
        """More text. Stop strings that are complete in it end the choice unless `stops_count` is unset."""
        self._counts = stops_count
        if self._reasoning is not None:
            self._take(self._reasoning.feed(text))
        else:
            self._take_content(text)
        return self._drain()

    def finish(self, *, cut: bool) -> list[TurnEvent]:
        """The text has ended, or was `cut` by a limit."""
        if self._reasoning is not None:
            self._take(self._reasoning.finish())
        if self._tools is not None:
            self._answer(self._tools.finish())
        if self._stop is not None and not self.is_over:
            self._emit_content(self._stop.finish())
        if not cut:
            self._complete_call()
        return self._drain()

    def _drain(self) -> list[TurnEvent]:
        events, self._events = self._events, []
        return events

    def _take(self, parts: Iterable[Part]) -> None:
        """Parts from the reasoning's parser: their content may hold calls."""
        for part in parts:
            if isinstance(part, Content):
                self._take_content(part.text)
            elif isinstance(part, Reasoning):
                if self._shows_reasoning and not self.is_over:
                    self._events.append(ReasoningDelta(self._number, part.text))
            elif self._tools is not None:
                self._answer((part,))
            elif isinstance(part, CallArguments):
                self._take_content(part.text)

    def _take_content(self, text: str) -> None:
        self._answer((Content(text),) if self._tools is None else self._tools.feed(text))

    def _answer(self, parts: Iterable[Part]) -> None:
        """Parts of the answer, as they go out."""
        for part in parts:
            if self.is_over:
                return
            if isinstance(part, Content):
                self._take_answer_text(part.text)
            elif isinstance(part, CallStart):
                self._start_call(part)
            elif isinstance(part, CallArguments):
                self._has_arguments = True
                self._events.append(ToolCallDelta(self._number, self.num_calls - 1, part.text))

    def _take_answer_text(self, text: str) -> None:
        if self._stop is None:
            self._emit_content(text)
            return
        self._emit_content(self._stop.feed(text, counts=self._counts))
        self.is_over = self._stop.found is not None

    def _emit_content(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(self._number, text))

    def _start_call(self, start: CallStart) -> None:
        self._complete_call()
        if self._one_call and self.num_calls:
            self.is_over = True
            return
        number, self.num_calls = self.num_calls, self.num_calls + 1
        self._has_arguments = False
        own_id = start.id
        if own_id is None or own_id in self._ids:
            own_id = self._make_id(start.name, number)
        self._ids.add(own_id)
        self._events.append(ToolCallStart(self._number, number, own_id, start.name))

    def _complete_call(self) -> None:
        """A call without arguments has the empty object."""
        if self.num_calls and not self._has_arguments:
            self._has_arguments = True
            self._events.append(ToolCallDelta(self._number, self.num_calls - 1, "{}"))
