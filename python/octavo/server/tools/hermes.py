"""Hermes and Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>, one call or more in each pair of tags."""

from __future__ import annotations

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.base import ToolFormat
from octavo.server.tools.json_calls import JsonCalls

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesCalls(JsonCalls):
    opening = Marks((OPEN,))
    closing = Marks((CLOSE,))

    def _calls(self, mark: str) -> Steps[None]:
        yield from self.closed_by(self.closing)


FORMAT = ToolFormat(parser=HermesCalls.parser, marks=(OPEN, CLOSE), evidence=((OPEN,),))
