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


BEGIN = '{"name": JSONNAME, "arguments": '
FORMAT = ToolFormat(
    parser=Phi4MiniCalls.parser,
    marks=OPEN[1:] + CLOSE,
    shapes=(
        CallShape(
            begin=BEGIN,
            end="}",
            before=OPEN[0],
            between=", ",
            after="]",
            trigger=OPEN[0],
            also=(
                CallShape(
                    begin=BEGIN, end="}", before=f"{OPEN[1]}[", between=", ", after=f"]{CLOSE[0]}", trigger=OPEN[1]
                ),
            ),
        ),
    ),
    evidence=(("functools",), ("<|tool_call|>", "<|/tool_call|>")),
)
