"""gpt-oss: messages <|start|>assistant<|channel|>CHANNEL to=RECIPIENT <|constrain|>json<|message|>TEXT<|end|>.

The analysis channel is reasoning, a message to a recipient is a call, all else is content. The prompt ends in
<|start|>assistant, so the first message begins with its channel. The format's calls are read here too: reasoning, calls
and answer are messages of one kind.
"""

from __future__ import annotations

import re

from octavo.server.cursor import Marks, Sink, Steps, Trimmed
from octavo.server.parts import CallArguments, CallStart, Content, Reasoning
from octavo.server.reasoning.base import ReasoningFormat, ReasoningReader

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")


class HarmonyMessages(ReasoningReader):
    """Reads messages. `started`: the text begins inside the analysis channel."""

    def __init__(self, started: bool = False) -> None:
        self._content = Trimmed(lambda text: self.cursor.emit(Content(text)))
        super().__init__(started)

    def _run(self) -> Steps[None]:
        cursor = self.cursor
        body, header = Marks((START, CHANNEL, *ENDS)), Marks((MESSAGE,))
        sink: Sink = self._reasoning() if self.thinks else self._content
        in_markup = True
        while True:
            mark = yield from cursor.until(body, sink, in_markup=in_markup or sink is not self._content)
            in_markup = False
            if not mark:
                break
            self._content.drop()
            self.thinks = False
            if mark in ENDS:
                sink = self._content
                continue
            cursor.record(len(mark))
            pieces = [mark]
            found = yield from cursor.until(header, pieces.append)
            if found or cursor.is_cut:
                cursor.forget()
                sink = self._open("".join(pieces)) if found else self._content
            else:
                self._content(cursor.recorded())
                sink = self._content
        if isinstance(sink, Trimmed):
            sink.flush()

    def _open(self, header: str) -> Sink:
        """Where the text of a message goes."""
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            emit = self.cursor.emit
            emit(CallStart(recipient.group(1)))
            return Trimmed(lambda text: emit(CallArguments(text)), strip_start=True)
        channel = _CHANNEL.search(header)
        return self._reasoning() if channel is not None and channel.group(1) == "analysis" else self._content

    def _reasoning(self) -> Trimmed:
        self.thinks = True
        emit = self.cursor.emit
        return Trimmed(lambda text: emit(Reasoning(text)), strip_start=True)


MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
FORMAT = ReasoningFormat(
    parser=HarmonyMessages,
    opens=(f"{CHANNEL}analysis{MESSAGE}",),
    close=f"<|end|>{START}assistant",
    end=f"<|end|>{START}assistant{CHANNEL}final{MESSAGE}",
    answer=f"{CHANNEL}final{MESSAGE}",
    marks=MARKS,
    evidence=((CHANNEL, MESSAGE),),
)
