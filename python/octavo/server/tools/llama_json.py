"""Llama 3: {"name": …, "parameters": {…}} as the whole message, or after <|python_tag|>; ";" between calls."""

from __future__ import annotations

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.json_calls import CALL_BEGINNING, UnmarkedCalls
from octavo.server.tools.shape import CallShape

TAG = "<|python_tag|>"


class LlamaJsonCalls(UnmarkedCalls):
    opening = Marks((TAG,))

    def _beginning(self) -> Steps[None]:
        yield from self.cursor.literal(TAG)
        yield from self.objects()

    def _calls(self, mark: str) -> Steps[None]:
        yield from self.objects()


FORMAT = ToolFormat(
    parser=LlamaJsonCalls.parser,
    marks=(TAG,),
    shapes=(
        CallShape(
            begin='{"name": JSONNAME, "parameters": ',
            end="}",
            between="; ",
            trigger=TAG,
            instead=CALL_BEGINNING,
            also=(CallShape(begin='{"type": "function", "name": JSONNAME, "parameters": ', end="}", between="; "),),
        ),
    ),
    evidence=((TAG,), ('{"name": function name, "parameters"',)),
)
