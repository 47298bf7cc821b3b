"""Phi-4-mini: functools[{"name": …, "arguments": {…}}, …], or the list between <|tool_call|> and <|/tool_call|>."""

from __future__ import annotations

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.json_calls import JsonCalls
from octavo.server.tools.shape import CallShape

OPEN = ("functools[", "<|tool_call|>")
CLOSE = ("<|/tool_call|>",)


class Phi4MiniCalls(JsonCalls):
    opening = Marks(OPEN)
    closing = Marks(CLOSE)

    def _calls(self, mark: str) -> Steps[None]:
        if mark.endswith("["):
            self.cursor.at -= 1
        yield from self.closed_by(self.closing)


FORMAT = ToolFormat(
    parser=Phi4MiniCalls.parser,
    marks=OPEN[1:] + CLOSE,
    shapes=(
        CallShape(begin='{"name": JSONNAME, "arguments": ', end="}", before="functools[", between=", ", after="]"),
    ),
    evidence=(("functools",), ("<|tool_call|>", "<|/tool_call|>")),
)
