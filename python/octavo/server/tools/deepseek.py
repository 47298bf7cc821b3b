"""DeepSeek: <｜tool▁calls▁begin｜>, <｜tool▁call▁begin｜> … <｜tool▁call▁end｜> for each call, <｜tool▁calls▁end｜>.

In between, V3 and R1 write function<｜tool▁sep｜>NAME, a line feed and the arguments in a ```json fence; V3.1 writes
NAME<｜tool▁sep｜>{…}. Both are read by one parser.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.base import NAME_END, CallReader
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.shape import CallShape

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekCalls(CallReader):
    opening = Marks((CALLS, CALL))
    following = Marks((CALL, CALLS_END))
    ends = Marks((CALL_END,))

    def _calls(self, mark: str) -> Steps[None]:
        cursor = self.cursor
        if mark == CALLS:
            yield from cursor.blanks()
            mark = yield from cursor.one_of(self.following)
        while mark == CALL:
            if not (yield from self._call()):
                return
            yield from cursor.blanks()
            cursor.record()
            mark = yield from cursor.one_of(self.following)
        if mark == CALLS_END:
            cursor.forget()

    def _call(self) -> Steps[bool]:
        cursor = self.cursor
        yield from cursor.blanks()
        name = yield from cursor.upto(NAME_END)
        if not name or not (yield from cursor.literal(SEPARATOR)):
            return False
        fence = False
        if (yield from cursor.blanks()) != "{":
            name = yield from cursor.upto(NAME_END)
            yield from cursor.blanks()
            fence = yield from cursor.fence()
        if not name or (yield from cursor.blanks()) != "{":
            return False
        self.start(name)
        if not (yield from self.json_arguments()):
            return False
        if fence:
            yield from cursor.literal("```")
            yield from cursor.blanks()
        return bool((yield from cursor.one_of(self.ends)))


MARKS = (CALLS, CALLS_END, CALL, SEPARATOR, CALL_END)
V3 = CallShape(begin=f"{CALL}function{SEPARATOR}NAME\n```json\n", end=f"\n```{CALL_END}", between="\n", trigger=CALL)
V31 = CallShape(begin=f"{CALL}NAME{SEPARATOR}", end=CALL_END, trigger=CALL)
FORMAT_V3 = ToolFormat(
    parser=DeepSeekCalls.parser,
    marks=MARKS,
    shapes=(replace(V3, before=CALLS, after=CALLS_END, trigger=CALLS, also=(V3,)),),
    evidence=((CALLS, "```json"),),
)
FORMAT_V31 = ToolFormat(
    parser=DeepSeekCalls.parser,
    marks=MARKS,
    shapes=(replace(V31, before=CALLS, after=CALLS_END, trigger=CALLS, also=(V31,)),),
    evidence=((CALLS,),),
)
