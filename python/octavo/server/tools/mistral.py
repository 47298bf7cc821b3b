"""Mistral: [TOOL_CALLS] [{"name": …, "arguments": {…}, "id": …}, …] up to tokenizer v7, and from v11 on
[TOOL_CALLS]name[CALL_ID]id[ARGS]{…} for each call, where [CALL_ID]id and [ARGS] may be missing."""

from __future__ import annotations

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.base import NAME_END, short_call_id
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.json_calls import JsonCalls
from octavo.server.tools.shape import CallShape

CALLS, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralCalls(JsonCalls):
    opening = Marks((CALLS,))

    def _calls(self, mark: str) -> Steps[None]:
        if (yield from self.cursor.blanks()) in ("[", "{"):
            yield from self.objects()
        else:
            yield from self._named()

    def _named(self) -> Steps[None]:
        cursor = self.cursor
        name = yield from cursor.upto(NAME_END)
        if not name:
            return
        own_id = None
        if (yield from cursor.literal(ID)):
            own_id = yield from cursor.upto(NAME_END)
        yield from cursor.literal(ARGS)
        if (yield from cursor.blanks()) == "{":
            self.start(name, own_id)
            self.arguments((yield from cursor.json_value(self.arguments)))


FORMAT = ToolFormat(
    parser=MistralCalls.parser,
    marks=(CALLS, ID, ARGS),
    shapes=(
        CallShape(begin=f"{CALLS}NAME{ARGS}", trigger=CALLS, needs=ARGS),
        CallShape(
            begin='{"name": JSONNAME, "arguments": ',
            end="}",
            before=f"{CALLS}[",
            between=", ",
            after="]",
            trigger=CALLS,
        ),
    ),
    evidence=((CALLS,),),
    make_id=short_call_id,
)
