"""Llama 3: {"name": …, "parameters": {…}} as the whole message, or after <|python_tag|>; ";" between calls."""

from __future__ import annotations

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.base import ToolFormat
from octavo.server.tools.json_calls import UnmarkedCalls

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
    evidence=((TAG,), ('{"name": function name, "parameters"',)),
)
