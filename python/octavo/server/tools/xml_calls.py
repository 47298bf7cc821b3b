"""Calls whose arguments are tagged one by one: what Qwen3-coder's and GLM's parsers share.

The arguments are told as JSON while they come: strings at once, other types when their value is whole.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring

from octavo.server.cursor import Marks, Steps
from octavo.server.tools.base import CallReader
from octavo.server.tools.values import is_text, to_json


class XmlCalls(CallReader):
    """Reads arguments into JSON.

    Attributes:
        value_end: What ends an argument's value.
        value_lines: A value stands on lines of its own: a line feed before and after is markup.
    """

    value_end: Marks
    value_lines = False

    def begin(self, name: str) -> None:
        """A call; its arguments come by `argument`, then `end`."""
        self.start(name)
        self._name = name
        self._num_arguments = 0

    def argument(self, key: str) -> Steps[bool]:
        """Read the value of an argument, up to its end mark; False when it is cut."""
        schema, root = self.tools.parameter(self._name, key), self.tools.parameters(self._name)
        head = ("{" if self._num_arguments == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._num_arguments += 1
        self.arguments(head)
        value = _Value(self.value_lines)
        if is_text(schema, root):
            self.arguments('"')
            found = yield from self.cursor.until(
                self.value_end, lambda text: self.arguments(encode_basestring(value.more(text))[1:-1]), in_markup=True
            )
            if found:
                self.arguments('"')
            return bool(found)
        pieces: list[str] = []
        found = yield from self.cursor.until(self.value_end, lambda text: pieces.append(value.more(text)))
        if found:
            self.arguments(to_json("".join(pieces), schema, root))
        return bool(found)

    def end(self) -> None:
        """The call is whole."""
        self.arguments("}" if self._num_arguments else "{}")


class _Value:
    """Text of a value without the line feeds around it."""

    def __init__(self, lines: bool) -> None:
        self._lines = lines
        self._at_start = True
        self._held = ""

    def more(self, text: str) -> str:
        """What is certainly part of the value; a line feed at the end never comes out."""
        if not self._lines:
            return text
        text = self._held + text
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix("\n")
        self._held = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")
