"""Granite: "Here is my thought process:" … "Here is my response:" (3.2),
<think>…</think><response>…</response> (3.3)."""

from __future__ import annotations

from octavo.server.cursor import Marks, Steps, Trimmed
from octavo.server.parts import Content, Reasoning
from octavo.server.reasoning.base import ReasoningFormat, ReasoningReader

THOUGHT = ("Here is my thought process:", "Here's my thought process:", "<think>")
RESPONSE = ("Here is my response:", "Here's my response:", "</think>")
WRAPPING = ("<response>", "</response>")


class GraniteReasoning(ReasoningReader):
    """Phrases count only where they belong: the first at the beginning, the second after it. Tags count everywhere."""

    def _run(self) -> Steps[None]:
        cursor = self.cursor
        content = Trimmed(lambda text: cursor.emit(Content(text)))
        reasoning = Trimmed(lambda text: cursor.emit(Reasoning(text)))
        reasoning.drop()
        if not self.thinks:
            cursor.record()
            yield from cursor.blanks()
            self.thinks = bool((yield from cursor.one_of(Marks(THOUGHT))))
            if self.thinks:
                cursor.forget()
            else:
                content(cursor.recorded())
        if self.thinks:
            ended = yield from cursor.until(Marks(RESPONSE), reasoning)
            if not ended:
                reasoning.flush()
            self.thinks = not ended
            content.drop()
        while (yield from cursor.until(Marks(WRAPPING), content)):
            content.drop()
        content.flush()


FORMAT = ReasoningFormat(
    parser=GraniteReasoning,
    opens=THOUGHT,
    close="Here is my response:",
    end="\nHere is my response:",
    marks=("<think>", "</think>", *WRAPPING),
    evidence=(("Here is my thought process:",), ("<think>", "<response>", "<|start_of_role|>")),
)
