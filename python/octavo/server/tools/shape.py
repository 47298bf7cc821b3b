"""How calls of a format are written, for grammars that make a model write them: the parsers' counterpart.

Not here: when a grammar is wanted (server/turn_form.py), and what reads calls (each format's parser).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.server.structural import Form, either, free, pattern, schema, sequence, several, tag, text, triggered
from octavo.server.tools.base import Tools
from octavo.server.tools.values import types_of

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
OPEN_WORDS = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "not"})
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallShape:
    """How calls are written.

    Attributes:
        begin: What stands before a call's arguments; "NAME" in it stands for the name, "JSONNAME" for the name in
            quotes.
        end: What stands after them.
        before, between, after: What stands before all calls, between two, and after all.
        trigger: Text that begins a call and nothing else; "" when there is none.
        arguments: The arguments of a schema.
        needs: A text that the model has a token for when this shape is its own.
        one_call: A turn of the model ends with its first call.
    """

    begin: str
    end: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    trigger: str = ""
    arguments: Callable[[Mapping[str, Any]], Form] = schema
    needs: str | None = None
    one_call: bool = False

    @property
    def example(self) -> str:
        """A call in words."""
        begin = self.begin.replace("JSONNAME", '"FUNCTION"').replace("NAME", "FUNCTION")
        return f"{self.before}{begin}{{ARGUMENTS}}{self.end}{self.after}"

    def call(self, name: str, parameters: Mapping[str, Any]) -> Form:
        """A call of one function."""
        begin = self.begin.replace("JSONNAME", json.dumps(name)).replace("NAME", name)
        return tag(begin, self.arguments(parameters), self.end)

    def required(self, tools: Tools, names: Sequence[str], *, only_one: bool) -> Form:
        """One call of these functions or more, and nothing else."""
        calls = several(
            [self.call(name, _parameters(tools, name)) for name in names],
            self.between,
            only_one=only_one or self.one_call,
        )
        return sequence(*_texts(self.before), calls, *_texts(self.after))

    def when_called(self, tools: Tools, *, only_one: bool) -> Form:
        """Any text; calls in it are right where their tool is strict, and JSON objects elsewhere."""
        calls = [
            self.call(name, _parameters(tools, name) if function.get("strict") else ANY_ARGUMENTS)
            for name, function in tools.functions.items()
        ]
        return triggered([self.trigger], calls, only_one=only_one or self.one_call)


def _texts(value: str) -> list[Form]:
    return [text(value)] if value else []


def _parameters(tools: Tools, name: str) -> Mapping[str, Any]:
    """The schema of arguments that are made: without arguments that it does not name, unless it speaks of such."""
    parameters = tools.parameters(name) or NO_ARGUMENTS
    if "properties" not in parameters or not OPEN_WORDS.isdisjoint(parameters):
        return parameters
    return {**parameters, "additionalProperties": False}


def tagged_arguments(key_begin: str, key_end: str, value_end: str) -> Callable[[Mapping[str, Any]], Form]:
    """Arguments that are tagged one by one, in the order of the schema: strings as they are, other values as JSON."""

    def form(parameters: Mapping[str, Any]) -> Form:
        properties = parameters.get("properties")
        required = parameters.get("required") or ()
        elements: list[Form] = []
        for key, value in (properties if isinstance(properties, Mapping) else {}).items():
            argument = _argument(f"{key_begin}{key}{key_end}", value, parameters, value_end)
            elements.append(argument if key in required else either(argument, text("")))
        return sequence(*elements) if elements else text("")

    return form


def _argument(begin: str, value: Any, root: Mapping[str, Any], end: str) -> Form:
    if not isinstance(value, Mapping):
        return free(begin, end)
    choices = value.get("enum")
    if types_of(value, root) != {"string"}:
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return tag(begin, schema({**definitions, **value}), end)
    if isinstance(choices, list):
        return tag(begin, either(*map(text, choices)), end)
    return tag(begin, pattern(value["pattern"]), end) if "pattern" in value else free(begin, end)
