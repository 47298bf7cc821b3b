"""Qwen3-coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>, each tag on a line
of its own; the outer pair may be missing."""

from __future__ import annotations

from dataclasses import replace

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.arguments import tagged_arguments
from octavo.server.tools.base import NAME_END
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.shape import CallShape
from octavo.server.tools.xml_calls import XmlCalls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderCalls(XmlCalls):
    opening = Marks((OPEN, FUNCTION))
    inner = Marks((PARAMETER, FUNCTION_END))
    key_end = Marks((">",))
    value_end = Marks((PARAMETER_END,))
    following = Marks((FUNCTION, CLOSE))
    value_lines = True

    def _calls(self, mark: str) -> Steps[None]:
        cursor = self.cursor
        if mark == OPEN:
            yield from cursor.blanks()
            mark = (yield from cursor.one_of(self.following)) and FUNCTION
        while mark == FUNCTION:
            name = yield from cursor.upto(NAME_END)
            if not name or not (yield from cursor.literal(">")):
                return
            self.begin(name)
            if not (yield from self._body()):
                return
            yield from cursor.blanks()
            cursor.record()
            mark = yield from cursor.one_of(self.following)
        if mark == CLOSE:
            cursor.forget()

    def _body(self) -> Steps[bool]:
        """The parameters up to the end of the function; False when it is cut or broken."""
        cursor = self.cursor
        while True:
            cursor.record()
            yield from cursor.blanks()
            tag = yield from cursor.one_of(self.inner)
            if tag == FUNCTION_END:
                cursor.forget()
                self.end()
                return True
            if tag != PARAMETER:
                return False
            key: list[str] = []
            if not (yield from cursor.until(self.key_end, key.append)):
                return False
            cursor.forget()
            if not (yield from self.argument("".join(key).strip())):
                return False


SHAPE = CallShape(
    begin=f"{FUNCTION}NAME>\n",
    end=FUNCTION_END,
    between="\n",
    trigger=FUNCTION,
    arguments=tagged_arguments(PARAMETER, ">\n", f"\n{PARAMETER_END}\n"),
)
FORMAT = ToolFormat(
    parser=Qwen3CoderCalls.parser,
    marks=(OPEN, CLOSE, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END),
    shapes=(replace(SHAPE, begin=f"{OPEN}\n{SHAPE.begin}", end=f"{SHAPE.end}\n{CLOSE}", trigger=OPEN, also=(SHAPE,)),),
    evidence=((FUNCTION, PARAMETER),),
)
