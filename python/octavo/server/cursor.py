"""A cursor over text that comes in pieces, for parsers written as if all of it were there.

A parser is a generator that yields when it needs more text. Its steps (`until`, `literal`, `json_value`, …) decide only
on what can't change any more, so that the result is the same wherever the text is cut. Not here: any format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from octavo.server.parts import CallArguments, Content, Part, Reasoning

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], None]

# Longest text that is kept because it may have to be given back: a call's name and what stands before it.
MAX_RECORD_CHARS = 1 << 16
# Most blanks before a tag that are taken for part of the markup.
MAX_BLANKS = 16
_NOT_BLANK = re.compile(r"\S")
_STRING_STOP = re.compile(r'["\\]')
_VALUE_STOP = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\]<;]")


class Marks:
    """Strings to look for; none may be part of another."""

    def __init__(self, marks: Iterable[str]) -> None:
        self.marks = tuple(dict.fromkeys(marks))
        assert not any(a != b and a in b for a in self.marks for b in self.marks), "one mark contains another"
        self.pattern = re.compile("|".join(map(re.escape, self.marks)))
        self._firsts = "".join({mark[0] for mark in self.marks})
        self._longest = max(map(len, self.marks)) - 1

    def held(self, text: str, start: int) -> int:
        """How many characters at the end of `text` may be the beginning of a mark."""
        low = max(start, len(text) - self._longest)
        at = min((i for i in (text.find(first, low) for first in self._firsts) if i >= 0), default=-1)
        while 0 <= at < len(text):
            tail = text[at:]
            if any(mark.startswith(tail) for mark in self.marks):
                return len(tail)
            at += 1
        return 0


class Cursor:
    """The text, how far it has been read, and the parts found so far."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._record: int | None = None
        self._parts: list[Part] = []

    def push(self, text: str) -> None:
        """More text has come; what was read and is not recorded is let go."""
        keep = self.at if self._record is None else self._record
        self.text = self.text[keep:] + text
        self.at -= keep
        if self._record is not None:
            self._record = 0

    def emit(self, part: Part) -> None:
        """Add a part, joined to the one before when both are text of a kind."""
        last = self._parts[-1] if self._parts else None
        if isinstance(part, Reasoning | Content | CallArguments):
            if not part.text:
                return
            if last is not None and type(last) is type(part):
                last.text += part.text
                return
        self._parts.append(part)

    def drain(self) -> list[Part]:
        """The parts since the last time."""
        parts, self._parts = self._parts, []
        return parts

    # --- text that may have to be given back

    def record(self, num_read: int = 0) -> None:
        """Keep what is read from here on, and the `num_read` characters before."""
        self._record = self.at - num_read

    def forget(self) -> None:
        """Don't keep it any longer."""
        self._record = None

    def recorded(self) -> str:
        """What was read since `record`, which is forgotten."""
        assert self._record is not None
        text, self._record = self.text[self._record : self.at], None
        return text

    @property
    def is_recording(self) -> bool:
        return self._record is not None

    @property
    def is_cut(self) -> bool:
        """The text has ended and all of it was read."""
        return self.ended and self.at == len(self.text)

    def _edge(self) -> tuple[int, bool]:
        """Where the text that may be read ends, and whether more will never come there."""
        end = len(self.text)
        if self._record is not None and end - self._record >= MAX_RECORD_CHARS:
            return self._record + MAX_RECORD_CHARS, True
        return end, self.ended

    def rest(self) -> str:
        """Read all that is there."""
        text, self.at = self.text[self.at :], len(self.text)
        return text

    # --- steps. While text is recorded they read as if it ended after MAX_RECORD_CHARS.

    def peek(self, count: int = 1) -> Steps[str]:
        """The next characters, not read; fewer at the end."""
        while True:
            end, final = self._edge()
            if end - self.at >= count or final:
                return self.text[self.at : min(end, self.at + count)]
            yield

    def blanks(self) -> Steps[str]:
        """Read blanks up to the next character, which is returned without being read; "" at the end."""
        while True:
            end, final = self._edge()
            found = _NOT_BLANK.search(self.text, self.at, end)
            if found is not None:
                self.at = found.start()
                return found.group()
            self.at = end
            if final:
                return ""
            yield

    def literal(self, wanted: str) -> Steps[bool]:
        """Read exactly this text, or nothing (all that is left, when the text ends inside)."""
        while True:
            end, final = self._edge()
            there = self.text[self.at : min(end, self.at + len(wanted))]
            if there == wanted:
                self.at += len(wanted)
                return True
            if not wanted.startswith(there):
                return False
            if final:
                self.at = end
                return False
            yield

    def one_of(self, marks: Marks) -> Steps[str]:
        """Read the mark that stands here; "" and nothing read when there is none (all that is left, when the text ends
        inside of one)."""
        while True:
            end, final = self._edge()
            found = marks.pattern.match(self.text, self.at, end)
            if found is not None:
                self.at = found.end()
                return found.group()
            there = self.text[self.at : end]
            if not any(mark.startswith(there) for mark in marks.marks):
                return ""
            if final:
                self.at = end
                return ""
            yield

    def fence(self) -> Steps[bool]:
        """Read the opening of a code fence for JSON, if one stands here."""
        found = yield from self.literal("```")
        if found:
            yield from self.literal("json")
        return found

    def until(self, marks: Marks, sink: Sink, *, in_markup: bool = False) -> Steps[str]:
        """Read up to the first mark; what stands before goes to `sink`. The mark, read; "" at the end.

        The beginning of a mark at the end of the text is text, but not `in_markup`, where a mark must come.
        """
        while True:
            edge, final = self._edge()
            found = marks.pattern.search(self.text, self.at, edge)
            if found is not None:
                if found.start() > self.at:
                    sink(self.text[self.at : found.start()])
                self.at = found.end()
                return found.group()
            end = edge if final and not in_markup else edge - marks.held(self.text, self.at)
            if end > self.at:
                piece, self.at = self.text[self.at : end], end
                sink(piece)
            if final:
                self.at = edge
                return ""
            yield

    def upto(self, stops: re.Pattern[str]) -> Steps[str | None]:
        """Read up to a character that `stops` matches, which stays unread. None when the text ends first."""
        pieces = []
        while True:
            edge, final = self._edge()
            found = stops.search(self.text, self.at, edge)
            end = found.start() if found is not None else edge
            pieces.append(self.text[self.at : end])
            self.at = end
            if found is not None:
                return "".join(pieces)
            if final:
                return None
            yield

    def json_string(self) -> Steps[str | None]:
        """Read a JSON string; None when there is none or it is broken."""
        if (yield from self.peek()) != '"':
            return None
        pieces: list[str] = []
        closing = yield from self.json_value(pieces.append)
        return load_string("".join(pieces) + closing) if closing else None

    def json_value(self, sink: Sink) -> Steps[str]:
        """Read one JSON value by its brackets and quotes. All but its last character goes to `sink` as it comes; the
        last one is returned, "" when the text ends before it. Scalars come in one piece."""
        if (yield from self.peek()) not in ("{", "[", '"'):
            scalar = (yield from self.upto(_SCALAR_END)) or ""
            sink(scalar[:-1])
            return scalar[-1:]
        depth, in_string, at = 0, False, self.at
        while True:
            edge, final = self._edge()
            found = (_STRING_STOP if in_string else _VALUE_STOP).search(self.text, at, edge)
            escape = found is not None and found.group() == "\\"
            if found is None or (escape and found.end() == edge):
                end = edge if found is None or final else found.start()
                piece, self.at = self.text[self.at : end], end
                sink(piece)
                if final:
                    return ""
                yield
                at = self.at
                continue
            stop, at = found.group(), found.end() + escape
            if stop == '"':
                in_string = not in_string
            elif not escape:
                depth += 1 if stop in "{[" else -1
            if depth <= 0 and not in_string:
                sink(self.text[self.at : at - 1])
                self.at = at
                return stop


def load_string(text: str) -> str | None:
    """The string that JSON text (with raw control characters allowed) stands for; None for anything else."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class CursorParser:
    """A parser (see parts.py) made of a cursor and the generator that reads it."""

    def __init__(self, cursor: Cursor, steps: Steps[None]) -> None:
        self._cursor = cursor
        self._steps = steps
        next(steps, None)

    def feed(self, text: str) -> list[Part]:
        """See `Parser.feed`."""
        if text:
            self._cursor.push(text)
            next(self._steps, None)
        return self._cursor.drain()

    def finish(self) -> list[Part]:
        """See `Parser.finish`."""
        self._cursor.ended = True
        for _ in self._steps:
            pass
        return self._cursor.drain()


class Trimmed:
    """A sink that holds back blanks at the end, and leaves out those at the beginning when told so."""

    def __init__(self, sink: Sink, *, strip_start: bool = False) -> None:
        self._sink = sink
        self._blanks = ""
        self._at_start = strip_start

    def __call__(self, text: str) -> None:
        if self._at_start:
            text = text.lstrip()
            if not text:
                return
            self._at_start = False
        text = self._blanks + text
        num_blanks = min(len(text) - len(text.rstrip()), MAX_BLANKS)
        self._blanks = text[len(text) - num_blanks :]
        self._sink(text[: len(text) - num_blanks])

    def drop(self) -> None:
        """Markup comes next: blanks before and after it are not text."""
        self._blanks = ""
        self._at_start = True

    def flush(self) -> None:
        """No markup follows: the blanks are text."""
        self._sink(self._blanks)
        self._blanks = ""
