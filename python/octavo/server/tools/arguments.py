"""How arguments are written that are no JSON object: tagged one by one, or as keywords of a call in Python.

Not here: what stands around them (tools/shape.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from octavo.server.structural import Form, either, free, pattern, pattern_within, schema, sequence, tag, text
from octavo.server.tools.values import resolved, types_of

_ANCHORS = re.compile(r"^\^|(?<!\\)((?:\\\\)*)\$$")
"""At the two ends, where they say what is so anyway."""


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
    if types_of(value, root) != {"string"}:
        return tag(begin, _value(value, root), end)
    value = resolved(value, root)
    choices = value.get("enum", [value["const"]] if "const" in value else None)
    if isinstance(choices, list):
        return tag(begin, either(*(text(choice) for choice in choices if _is_allowed(choice, value))), end)
    # So that its end is known: without the first character of what ends it.
    lengths = f"[^{end.strip()[0]}]{{{value.get('minLength', 0)},{value.get('maxLength', '')}}}"
    has_lengths = "minLength" in value or "maxLength" in value
    if "pattern" in value:
        return tag(begin, _like(value["pattern"], lengths if has_lengths else None), end)
    return tag(begin, pattern(lengths), end) if has_lengths else free(begin, end)


def _is_allowed(choice: object, value: Mapping[str, Any]) -> bool:
    """Whether one of a string's values has the length that the schema asks for, too."""
    least, most = value.get("minLength", 0), value.get("maxLength")
    return isinstance(choice, str) and len(choice) >= least and (most is None or len(choice) <= most)


def _like(expression: str, lengths: str | None) -> Form:
    if lengths is None:
        return pattern(expression)
    return pattern_within(_ANCHORS.sub(r"\1", expression), lengths)


def _value(value: Any, root: Mapping[str, Any]) -> Form:
    """JSON of a property's schema, which may refer to definitions of the whole."""
    if not isinstance(value, Mapping):
        return schema(value)
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return schema({**definitions, **value})


def keyword_arguments(parameters: Mapping[str, Any]) -> Form:
    """name=value, …: the required ones in the order of the schema, then the others; values as JSON."""
    given = parameters.get("properties")
    properties = given if isinstance(given, Mapping) else {}
    required = [name for name in parameters.get("required") or () if isinstance(name, str)]
    optional = [name for name in properties if name not in required]

    def argument(name: str, before: str = "") -> Form:
        return sequence(text(f"{before}{name}="), _value(properties.get(name, {}), parameters))

    def rest(names: list[str]) -> list[Form]:
        return [either(argument(name, ", "), text("")) for name in names]

    if required:
        first, *others = [argument(name, ", " if at else "") for at, name in enumerate(required)]
        return sequence(first, *others, *rest(optional))
    starts = [sequence(argument(name), *rest(optional[at + 1 :])) for at, name in enumerate(optional)]
    return either(*starts, text(""))
