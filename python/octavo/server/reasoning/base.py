"""What a format of reasoning is.

The rules that all parsers follow: reasoning is what stands between the format's tags, the rest is content; tags are
never shown; blanks around the tags are markup. A prompt that ends in an open tag starts the answer in reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.server.cursor import Cursor, CursorParser, Steps
from octavo.server.parts import Parser


class ReasoningParser(Parser, Protocol):
    """A parser that knows where the text is."""

    @property
    def thinks(self) -> bool:
        """The text so far ends inside reasoning."""
        ...


class ReasoningReader(CursorParser):
    """Base of the parsers: reads by its `_run` generator and keeps `thinks` right."""

    def __init__(self, started: bool) -> None:
        self.cursor = Cursor()
        self.thinks = started
        super().__init__(self.cursor, self._run())

    def _run(self) -> Steps[None]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A way to write reasoning.

    Attributes:
        parser: Makes the parser of one sequence, from whether the prompt left it in reasoning.
        opens: Tags that begin reasoning: a prompt that ends in one (and blanks) has begun it.
        close: The text that ends reasoning.
        end: What a model writes between reasoning and answer: a thinking budget makes it write this.
        marks: Texts that the parser must see, though they may be special tokens.
        evidence: The format is chosen when a chat template has all strings of one of these groups.
        answer: What stands before an answer's text, wherever it begins.
        starts: The answer starts in reasoning whatever the prompt says, unless the prompt ends in `end`.
    """

    parser: Callable[[bool], ReasoningParser]
    opens: Sequence[str]
    close: str
    end: str
    marks: Sequence[str]
    evidence: Sequence[Sequence[str]] = ()
    answer: str = ""
    starts: bool = False

    def starts_in_reasoning(self, prompt_end: str) -> bool:
        """Whether an answer to a prompt that ends in this text begins in reasoning."""
        text = prompt_end.rstrip()
        if text.endswith(tuple(self.opens)):
            return True
        return self.starts and not self.is_over(prompt_end)

    def is_over(self, prompt_end: str) -> bool:
        """Whether a prompt that ends in this text has ended reasoning already."""
        return prompt_end.rstrip().endswith(self.close)
