"""Granite: <|tool_call|>[{"name": …, "arguments": {…}}, …] (3.x), <function_call>{…} (20B function calling), and
<tool_call>{…}</tool_call> (4.0)."""

from __future__ import annotations

from dataclasses import replace

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


BEGIN = '{"name": JSONNAME, "arguments": '
LISTED = CallShape(begin=BEGIN, end="}", before=f"{OPEN[0]}[", between=", ", after="]", trigger=OPEN[0], needs=OPEN[0])
TAGGED = CallShape(begin=f"{OPEN[2]}\n{BEGIN}", end=f"}}\n{CLOSE[0]}", between="\n", trigger=OPEN[2])
SINGLE = CallShape(begin=f"{OPEN[1]}{BEGIN}", end="}", between="\n", trigger=OPEN[1])
FORMAT = ToolFormat(
    parser=GraniteCalls.parser,
    marks=(*OPEN, *CLOSE),
    shapes=(replace(LISTED, also=(TAGGED, SINGLE)), replace(TAGGED, also=(LISTED, SINGLE))),
    evidence=(("<|tool_call|>", "<|start_of_role|>"), ("<function_call>",), ("<|start_of_role|>", "<tool_call>")),
)
