"""Granite: <|tool_call|>[{"name": …, "arguments": {…}}, …] (3.x), <function_call>{…} (20B function calling), and
<tool_call>{…}</tool_call> (4.0)."""

from __future__ import annotations

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.base import ToolFormat
from octavo.server.tools.json_calls import JsonCalls

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
    evidence=(("<|tool_call|>", "<|start_of_role|>"), ("<function_call>",), ("<|start_of_role|>", "<tool_call>")),
)
