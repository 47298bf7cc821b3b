"""Any model: the message is {"name": …, "arguments": {…}} or a list of such objects, perhaps in a code fence.

The format for models whose chat template knows no tools: `INSTRUCTIONS` is then put before the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.server.cursor import Steps
from octavo.server.tools.format import ToolFormat
from octavo.server.tools.json_calls import CALL_BEGINNING, UnmarkedCalls
from octavo.server.tools.shape import CallShape

INSTRUCTIONS = (
    "You can call these functions (JSON Schema):\n{tools}\nTo call a function, answer with nothing but {example}"
)


class GenericJsonCalls(UnmarkedCalls):
    def _beginning(self) -> Steps[None]:
        cursor = self.cursor
        fenced = yield from cursor.fence()
        if (yield from self.objects()) and fenced and not cursor.is_recording:
            yield from cursor.blanks()
            yield from cursor.literal("```")

    def _later(self) -> Steps[None]:
        """After the beginning of the message, all is content."""
        while True:
            text = self.cursor.rest()
            self.content(text)
            if self.cursor.ended:
                break
            yield
        self.content.flush()


def instructions(tools: Iterable[Mapping[str, Any]], shape: CallShape | None) -> str:
    """What a model must be told when its template does not show it the tools; `shape` is how it shall write calls."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    written = shape or FORMAT.shapes[0]
    return INSTRUCTIONS.format(tools="\n".join(lines), example=written.example)


BEGIN = '{"name": JSONNAME, "arguments": '
ALSO = (
    CallShape(begin=BEGIN, end="}", between=", "),
    CallShape(begin=BEGIN, end="}", before="```json\n[", between=", ", after="]\n```"),
    CallShape(begin=BEGIN, end="}", before="```json\n", between=", ", after="\n```"),
)
FORMAT = ToolFormat(
    parser=GenericJsonCalls.parser,
    shapes=(
        CallShape(
            begin=BEGIN,
            end="}",
            before="[",
            between=", ",
            after="]",
            instead=rf"(```(json)?\s*)?({CALL_BEGINNING})",
            also=ALSO,
        ),
    ),
)
