"""Kimi K2: <|tool_calls_section_begin|> with, for each call, <|tool_call_begin|>functions.NAME:0
<|tool_call_argument_begin|>{…}<|tool_call_end|>, and <|tool_calls_section_end|>. "functions.NAME:0" is the call's id.
"""

from __future__ import annotations

import re
from dataclasses import replace

from octavo.server.cursor import Marks, Steps
from octavo.server.structural import pattern, schema, sequence, text
from octavo.server.tools.base import NAME_END, CallReader
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.shape import CallShape

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?([\w.-]+?)(?::\d+)?")


class KimiCalls(CallReader):
    opening = Marks((SECTION, CALL))
    following = Marks((CALL, SECTION_END))

    def _calls(self, mark: str) -> Steps[None]:
        cursor = self.cursor
        if mark == SECTION:
            yield from cursor.blanks()
            mark = yield from cursor.one_of(self.following)
        while mark == CALL:
            yield from cursor.blanks()
            own_id = (yield from cursor.upto(NAME_END)) or ""
            name = _ID.fullmatch(own_id)
            yield from cursor.blanks()
            if name is None or not (yield from cursor.literal(ARGUMENTS)) or (yield from cursor.blanks()) != "{":
                return
            self.start(name.group(1), own_id if ":" in own_id else None)
            if not (yield from self.json_arguments()):
                return
            yield from cursor.literal(CALL_END)
            yield from cursor.blanks()
            cursor.record()
            mark = yield from cursor.one_of(self.following)
        if mark == SECTION_END:
            cursor.forget()


def kimi_id(name: str, index: int) -> str:
    """The form that the model was trained on."""
    return f"functions.{name}:{index}"


SHAPE = CallShape(
    begin=f"{CALL}functions.NAME:",
    end=CALL_END,
    trigger=CALL,
    arguments=lambda parameters: sequence(pattern("[0-9]{1,3}"), text(ARGUMENTS), schema(parameters)),
)
FORMAT = ToolFormat(
    parser=KimiCalls.parser,
    marks=(SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END),
    shapes=(replace(SHAPE, before=SECTION, after=SECTION_END, trigger=SECTION, also=(SHAPE,)),),
    evidence=((SECTION,),),
    make_id=kimi_id,
)
