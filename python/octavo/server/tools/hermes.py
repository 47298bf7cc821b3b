"""Hermes and Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>, one call or more in each pair of tags."""

from __future__ import annotations

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.json_calls import JsonCalls
from octavo.server.tools.shape import CallShape

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesCalls(JsonCalls):
    opening = Marks((OPEN,))
    closing = Marks((CLOSE,))

    def _calls(self, mark: str) -> Steps[None]:
        yield from self.closed_by(self.closing)


SHAPE = CallShape(begin=f'{OPEN}\n{{"name": JSONNAME, "arguments": ', end=f"}}\n{CLOSE}", between="\n", trigger=OPEN)
FORMAT = ToolFormat(parser=HermesCalls.parser, marks=(OPEN, CLOSE), shapes=(SHAPE,), evidence=((OPEN,),))
