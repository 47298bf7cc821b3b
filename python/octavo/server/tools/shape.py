"""How calls of a format are written, for grammars that make a model write them: the parsers' counterpart.

Not here: when a grammar is wanted (server/turn_form.py), text with calls in it (tools/mixed.py), how arguments are
written that are no JSON object (tools/arguments.py), and what reads calls (each format's parser).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.server.structural import Form, schema, sequence, several, tag, text
from octavo.server.tools.base import Tools

OPEN_WORDS = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "not"})
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def _any_name(name: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class CallShape:
    """How calls are written.

    Attributes:
        begin: What stands before a call's arguments; "NAME" in it stands for the name, "JSONNAME" for the name in
            quotes.
        end: What stands after them.
        before, between, after: What stands before all calls, between two, and after all.
        trigger: A mark that begins calls (and what `before` begins with, unless `instead` is given); "" when there is
            none.
        closing: What stands after the calls that follow the trigger, where `instead` is given.
        instead: Calls are the whole message: how a message begins that the parser takes for calls (a regular
            expression of Rust's crate).
        arguments: The arguments of a schema.
        needs: A text that the model has a token for when this shape is its own.
        one_call: A turn of the model ends with its first call.
        also: Other ways to write calls that the format's parser reads.
        can_name: Whether functions and parameters can have a name.
        answer: Makes an answer of calls, one of which it may be: for formats that mark their text too.
    """

    begin: str
    end: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    trigger: str = ""
    closing: str = ""
    instead: str = ""
    arguments: Callable[[Mapping[str, Any]], Form] = schema
    needs: str | None = None
    one_call: bool = False
    also: tuple[CallShape, ...] = ()
    can_name: Callable[[str], bool] = _any_name
    answer: Callable[[Sequence[Form]], Form] | None = None

    @property
    def example(self) -> str:
        """A call in words."""
        begin = self.begin.replace("JSONNAME", '"FUNCTION"').replace("NAME", "FUNCTION")
        return f"{self.before}{begin}{{ARGUMENTS}}{self.end}{self.after}"

    def unwritable(self, tools: Tools) -> str | None:
        """The first name of a function or parameter that calls can't be written with."""
        names = (name for function in tools.functions for name in (function, *_properties(tools.parameters(function))))
        return next((name for name in names if not self.can_name(name)), None)

    def begin_of(self, name: str) -> str:
        """What stands before the arguments of a call of a function."""
        return self.begin.replace("JSONNAME", json.dumps(name)).replace("NAME", name)

    def call(self, name: str, parameters: Mapping[str, Any]) -> Form:
        """A call of one function."""
        return tag(self.begin_of(name), self.arguments(parameters), self.end)

    def required(self, tools: Tools, names: Sequence[str], *, only_one: bool) -> Form:
        """One call of these functions or more, and nothing else."""
        calls = several(
            [self.call(name, required_parameters(tools, name)) for name in names],
            self.between,
            only_one=only_one or self.one_call,
        )
        return sequence(*_texts(self.before), calls, *_texts(self.after))


def _texts(value: str) -> list[Form]:
    return [text(value)] if value else []


def _properties(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def required_parameters(tools: Tools, name: str) -> Mapping[str, Any]:
    """The schema of arguments that are made: an object, as arguments always are, also where the schema leaves that out;
    without arguments that it does not name, unless it speaks of such."""
    parameters = {**(tools.parameters(name) or NO_ARGUMENTS), "type": "object"}
    if "properties" not in parameters or not OPEN_WORDS.isdisjoint(parameters):
        return parameters
    return {**parameters, "additionalProperties": False}
