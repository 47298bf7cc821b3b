"""Calls that are JSON objects with a name and arguments, alone or in a list: the parser that several formats share.

Read beside {"name", "arguments"}: "parameters" for the arguments, arguments as a JSON string, any order of keys,
further keys ("type", "id"), and {"type": "function", "function": {…}}. Not here: the marks around (each
format's file).
"""

from __future__ import annotations

import json

from octavo.server.cursor import Marks, Steps, load_string
from octavo.server.tools.base import CallReader

ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset({"name", *ARGUMENTS, "type", "id", "function"})
CALL_BEGINNING = rf'(\[\s*)?\{{[\s,]*"({"|".join(sorted(KEYS))})"|(\[\s*)?\{{[\s,]*"[^"\\]*\\'
"""How the first object of a message begins that may be a call without a mark: with one of these keys (an escape in the
key may hide one), in a list or not."""


class JsonCalls(CallReader):
    """Reads lists of call objects.

    Attributes:
        known_only: Objects are calls only when they name a tool and have arguments: for formats without marks.
    """

    known_only = False

    def closed_by(self, closing: Marks) -> Steps[None]:
        """Read call objects, and the mark that ends them where it stands."""
        if (yield from self.objects()) and not self.cursor.is_recording:
            yield from self.cursor.blanks()
            yield from self.cursor.one_of(closing)

    def objects(self) -> Steps[bool]:
        """Read one call object, several after another, or a list; whether there was a call at all."""
        cursor = self.cursor
        in_list = (yield from cursor.blanks()) == "["
        if in_list:
            cursor.at += 1
        num_calls = 0
        while True:
            following = yield from cursor.blanks()
            if num_calls and following in (",", ";"):
                cursor.record()
                cursor.at += 1
                following = yield from cursor.blanks()
            if following != "{":
                break
            if num_calls and not cursor.is_recording:
                cursor.record()
            if not (yield from self._object()):
                return num_calls > 0
            num_calls += 1
        if in_list and following == "]" and num_calls:
            cursor.at += 1
            cursor.forget()
        return num_calls > 0

    def _object(self) -> Steps[bool]:
        """Read one object; False when it is no call (it is still recorded then) or was cut or broken on the way."""
        call = _Call(self)
        self.cursor.at += 1
        while True:
            following = yield from self.cursor.blanks()
            if following == "}":
                self.cursor.at += 1
                return call.end()
            if following == ",":
                self.cursor.at += 1
                following = yield from self.cursor.blanks()
            key = yield from self.cursor.json_string()
            if key is None or (yield from self.cursor.blanks()) != ":":
                return False
            self.cursor.at += 1
            yield from self.cursor.blanks()
            if not (yield from call.value(key)):
                return False
            if not self.cursor.is_recording:
                self.cursor.record()


class UnmarkedCalls(JsonCalls):
    """Reads call objects that nothing marks: only at the beginning of a message, only calls of tools that there are."""

    known_only = True

    def _run(self) -> Steps[None]:
        cursor = self.cursor
        cursor.record()
        yield from cursor.blanks()
        yield from self._beginning()
        self.give_back(drop_cut=self.tools.must_call)
        yield from self._later()

    def _beginning(self) -> Steps[None]:
        """Read the objects at the beginning of the message."""
        yield from self.objects()

    def _later(self) -> Steps[None]:
        """Read what follows the beginning of the message."""
        yield from super()._run()


class _Call:
    """One call object, as its members come."""

    def __init__(self, reader: JsonCalls) -> None:
        self._reader = reader
        self._name: str | None = None
        self._id: str | None = None
        self._waiting: str | None = None
        """Arguments that came before the name."""
        self._started = False

    def value(self, key: str) -> Steps[bool]:
        """Read a member's value; False when it is cut or broken, or shows that the object is no call."""
        cursor = self._reader.cursor
        if self._reader.known_only and key not in KEYS:
            return False
        if key in ARGUMENTS and self._known and (yield from cursor.peek()) == "{" and not self._started:
            self._start()
            return (yield from self._reader.json_arguments())
        pieces: list[str] = []
        closing = yield from cursor.json_value(pieces.append)
        if not closing:
            return False
        self._keep(key, "".join(pieces) + closing)
        return self._started or self._name is None or self._known

    def _keep(self, key: str, text: str) -> None:
        """A member's whole value, JSON."""
        if key == "name":
            self._name = load_string(text)
        elif key == "id":
            self._id = load_string(text)
        elif key in ARGUMENTS and self._waiting is None:
            self._waiting = _as_arguments(text)
        elif key == "function":
            self._take_function(text)

    def _take_function(self, text: str) -> None:
        """{"type": "function", "function": {"name", "arguments"}}, or "function" as another word for the name."""
        if text.startswith('"'):
            self._name = self._name or load_string(text)
            return
        nested = _Members(text)
        self._name = nested.name or self._name
        self._waiting = nested.arguments or self._waiting

    @property
    def _known(self) -> bool:
        if not self._name:
            return False
        return not self._reader.known_only or self._name in self._reader.tools

    def _start(self) -> None:
        assert self._name is not None
        self._started = True
        self._reader.start(self._name, self._id)

    def end(self) -> bool:
        """The object is whole: whether it was a call."""
        if self._started:
            self._reader.cursor.forget()
            return True
        if not self._known or (self._reader.known_only and self._waiting is None):
            return False
        self._start()
        self._reader.arguments(self._waiting or "{}")
        return True


class _Members:
    """Name and arguments of a whole object."""

    def __init__(self, text: str) -> None:
        try:
            value = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            value = None
        members = value if isinstance(value, dict) else {}
        name = members.get("name")
        self.name = name if isinstance(name, str) else None
        given = next((members[key] for key in ARGUMENTS if key in members), None)
        self.arguments = None if given is None else _as_arguments(json.dumps(given, ensure_ascii=False))


def _as_arguments(text: str) -> str:
    """A value as arguments: an object written as a string is that object, null is none."""
    if text.startswith('"'):
        text = load_string(text) or text
    return "{}" if text in ("null", "") else text
