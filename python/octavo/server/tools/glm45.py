"""GLM-4.5: <tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument, </tool_call>."""

from __future__ import annotations

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.arguments import tagged_arguments
from octavo.server.tools.base import NAME_END
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.shape import CallShape
from octavo.server.tools.xml_calls import XmlCalls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class Glm45Calls(XmlCalls):
    opening = Marks((OPEN,))
    inner = Marks((KEY, CLOSE))
    key_end = Marks((KEY_END,))
    value_end = Marks((VALUE_END,))

    def _calls(self, mark: str) -> Steps[None]:
        cursor = self.cursor
        yield from cursor.blanks()
        name = yield from cursor.upto(NAME_END)
        yield from cursor.blanks()
        tag = yield from cursor.one_of(self.inner)
        if not name or not tag:
            return
        self.begin(name)
        while tag == KEY:
            cursor.record(len(tag))
            key: list[str] = []
            found = yield from cursor.until(self.key_end, key.append)
            yield from cursor.blanks()
            if not found or not (yield from cursor.literal(VALUE)):
                return
            cursor.forget()
            if not (yield from self.argument("".join(key).strip())):
                return
            cursor.record()
            yield from cursor.blanks()
            tag = yield from cursor.one_of(self.inner)
        if tag == CLOSE:
            cursor.forget()
            self.end()


FORMAT = ToolFormat(
    parser=Glm45Calls.parser,
    marks=(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    shapes=(
        CallShape(
            begin=f"{OPEN}NAME\n",
            end=CLOSE,
            between="\n",
            trigger=OPEN,
            arguments=tagged_arguments(KEY, f"{KEY_END}\n{VALUE}", f"{VALUE_END}\n"),
        ),
    ),
    evidence=((KEY, VALUE),),
)
