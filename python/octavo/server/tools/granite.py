"""Granite: <|tool_call|>[{"name": …, "arguments": {…}}, …] (3.x), <function_call>{…} (20B function calling), and
<tool_call>{…}</tool_call> (4.0)."""

from __future__ import annotations

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.json_calls import JsonCalls
from octavo.server.tools.shape import CallShape

OPEN = ("<|tool_call|>", "<function_call>", "<tool_call>")
CLOSE = ("</tool_call>", "</function_call>")


class GraniteCalls(JsonCalls):
    opening = Marks(OPEN)
    closing = Marks(CLOSE)

    def _calls(self, mark: str) -> Steps[None]:
        yield from self.closed_by(self.closing)


FORMAT = ToolFormat(
    parser=GraniteCalls.parser,
    marks=(*OPEN, *CLOSE),
    shapes=(
        CallShape(
            begin='{"name": JSONNAME, "arguments": ',
            end="}",
            before=f"{OPEN[0]}[",
            between=", ",
            after="]",
            needs=OPEN[0],
        ),
        CallShape(
            begin=f'{OPEN[2]}\n{{"name": JSONNAME, "arguments": ', end=f"}}\n{CLOSE[0]}", between="\n", trigger=OPEN[2]
        ),
    ),
    evidence=(("<|tool_call|>", "<|start_of_role|>"), ("<function_call>",), ("<|start_of_role|>", "<tool_call>")),
)
