"""What a format of tool calls is: its parser, its marks, how it is recognized, and how its calls are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.server.parts import Parser
from octavo.server.tools.base import Tools, call_id
from octavo.server.tools.shape import CallShape


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way to write calls.

    Attributes:
        parser: Makes the parser of one sequence.
        marks: Texts that the parser must see, though they may be special tokens.
        evidence: The format is chosen when a chat template has all strings of one of these groups.
        shapes: How the calls are written; the first one whose token the model has is its own.
        make_id: An id for a call whose format has none: (name, number of the call in its turn).
    """

    parser: Callable[[Tools], Parser]
    marks: Sequence[str] = ()
    evidence: Sequence[Sequence[str]] = ()
    shapes: Sequence[CallShape] = ()
    make_id: Callable[[str, int], str] = call_id

    def shape(self, has_token: Callable[[str], bool]) -> CallShape | None:
        """The shape that the model writes; `has_token` knows its vocabulary."""
        return next((shape for shape in self.shapes if shape.needs is None or has_token(shape.needs)), None)
