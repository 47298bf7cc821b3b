"""The tools that a request offers, and the shared steps of the parsers of calls.

The rules that all parsers follow: a call is told as soon as its name and the beginning of its arguments are known. What
opens like a call but turns out not to be one (broken JSON, a name where none can be) is content, whole, marks
included. A call that is cut before its name is known is left out; one that is cut later keeps what came, and its last
bracket is told only when more text follows it, so that a cut call never looks complete where its format closes calls.
Blanks between content and calls are markup.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.server.cursor import Cursor, CursorParser, Marks, Steps, Trimmed
from octavo.server.parts import CallArguments, CallStart, Content, Parser
from octavo.server.tools.values import resolved

NAME_END = re.compile(r"[^\w.:/-]")
"""The first character that can't be part of a function's name, or of an id that holds one."""
_ALPHANUMERIC = string.ascii_letters + string.digits


class Tools:
    """The function tools of a request, by name.

    Attributes:
        must_call: The model was made to write a call (a grammar enforces it), so what opens like one is one.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]], *, must_call: bool = False) -> None:
        self.must_call = must_call
        self.functions: dict[str, Mapping[str, Any]] = {tool["function"]["name"]: tool["function"] for tool in tools}

    def __contains__(self, name: str) -> bool:
        return name in self.functions

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The schema of a function's arguments, in place of a reference to it (as pydantic writes models that hold
        themselves); {} when it has none or is unknown."""
        schema = self.functions.get(name, {}).get("parameters")
        if not isinstance(schema, Mapping):
            return {}
        target = resolved(schema, schema)
        return (
            schema if target is schema else {**{key: value for key, value in schema.items() if key != "$ref"}, **target}
        )

    def parameter(self, name: str, parameter: str) -> Mapping[str, Any] | None:
        """The schema of one argument; None when it is unknown."""
        properties = self.parameters(name).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else None


def call_id(name: str, index: int) -> str:
    """An id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id(name: str, index: int) -> str:
    """An id of nine letters and digits, the only kind that Mistral's templates take."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class CallReader:
    """Base of the parsers: content and calls on a cursor.

    A format's `_calls` reads what follows one of its opening marks and says whether it was a call.
    """

    opening: Marks

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.cursor = Cursor()
        self.content = Trimmed(lambda text: self.cursor.emit(Content(text)))

    @classmethod
    def parser(cls, tools: Tools) -> Parser:
        """A parser for one sequence."""
        reader = cls(tools)
        return CursorParser(reader.cursor, reader._run())

    def _run(self) -> Steps[None]:
        cursor = self.cursor
        while mark := (yield from cursor.until(self.opening, self.content, in_markup=self.tools.must_call)):
            cursor.record(len(mark))
            yield from self._calls(mark)
            self.give_back(drop_cut=True)
        self.content.flush()

    def _calls(self, mark: str) -> Steps[None]:
        """Read the calls after an opening mark; `start` is called for each. What is recorded at the end was no call."""
        raise NotImplementedError

    def give_back(self, *, drop_cut: bool) -> None:
        """What is still recorded was no call: content, unless the text was cut and `drop_cut`."""
        if self.cursor.is_recording:
            drop = drop_cut and self.cursor.is_cut
            text = self.cursor.recorded()
            if not drop:
                self.content(text)

    def start(self, name: str, id: str | None = None) -> None:
        """A call: what was recorded is its markup."""
        self.cursor.forget()
        self.content.drop()
        self.cursor.emit(CallStart(name, id))

    def arguments(self, text: str) -> None:
        """More of the call's arguments."""
        self.cursor.emit(CallArguments(text))

    def json_arguments(self) -> Steps[bool]:
        """Read the JSON object that is the call's arguments; its last bracket is told when more text follows it."""
        closing = yield from self.cursor.json_value(self.arguments)
        if closing and (yield from self.cursor.blanks()):
            self.arguments(closing)
        return bool(closing)
