"""Granite: "Here is my thought process:" … "Here is my response:" (3.2),
<think>…</think><response>…</response> (3.3)."""

from __future__ import annotations

from octavo.server.cursor import Cursor, CursorParser, Marks, Steps, Trimmed
from octavo.server.parts import Content, Parser, Reasoning
from octavo.server.reasoning.base import ReasoningFormat

THOUGHT = ("Here is my thought process:", "Here's my thought process:", "<think>")
RESPONSE = ("Here is my response:", "Here's my response:", "</think>")
WRAPPING = ("<response>", "</response>")


class GraniteReasoning:
    """Phrases count only where they belong: the first at the beginning, the second after it. Tags count everywhere."""

    def __init__(self, started: bool) -> None:
        self.cursor = Cursor()
        self._started = started

    @classmethod
    def parser(cls, started: bool) -> Parser:
        """A parser for one sequence."""
        reader = cls(started)
        return CursorParser(reader.cursor, reader._run())

    def _run(self) -> Steps[None]:
        cursor = self.cursor
        content = Trimmed(lambda text: cursor.emit(Content(text)))
        reasoning = Trimmed(lambda text: cursor.emit(Reasoning(text)))
        reasoning.drop()
        started = self._started
        if not started:
            cursor.record()
            yield from cursor.blanks()
            started = bool((yield from cursor.one_of(Marks(THOUGHT))))
            if started:
                cursor.forget()
            else:
                content(cursor.recorded())
        if started:
            ended = yield from cursor.until(Marks(RESPONSE), reasoning)
            if not ended:
                reasoning.flush()
            content.drop()
        while (yield from cursor.until(Marks(WRAPPING), content)):
            content.drop()
        content.flush()


FORMAT = ReasoningFormat(
    parser=GraniteReasoning.parser,
    opens=THOUGHT,
    end="\nHere is my response:",
    marks=("<think>", "</think>", *WRAPPING),
    evidence=(("Here is my thought process:",), ("<think>", "<response>", "<|start_of_role|>")),
)
