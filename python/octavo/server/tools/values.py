"""Argument values that come as text (XML and Python formats) as JSON of the type that the tool's schema wants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# JSON Schema's types -> Python's. bool is an int in Python, not in JSON.
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
    "string": (str,),
}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_MAX_DEPTH = 8


def types_of(schema: Mapping[str, Any] | None, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; empty when it does not say."""
    if schema is None or depth > _MAX_DEPTH:
        return frozenset()
    if isinstance(schema.get("$ref"), str):
        return types_of(_resolve(schema["$ref"], root), root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(name for name in kind if isinstance(name, str))
    for word in ("anyOf", "oneOf", "allOf"):
        members = schema.get(word)
        if isinstance(members, list):
            found = [types_of(member, root, depth + 1) for member in members if isinstance(member, Mapping)]
            return frozenset().union(*found) if all(found) else frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return frozenset(_type_of(value) for value in values) if isinstance(values, list) else frozenset()


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or what its reference stands for, also as the only member of allOf (a reference with a description, in
    older generators' words)."""
    for _ in range(_MAX_DEPTH):
        ref, members = schema.get("$ref"), schema.get("allOf")
        found = _resolve(ref, root) if isinstance(ref, str) else None
        if found is None and isinstance(members, list) and len(members) == 1 and isinstance(members[0], Mapping):
            found = {**{key: value for key, value in schema.items() if key != "allOf"}, **members[0]}
        if found is None:
            break
        schema = found
    return schema


def _resolve(ref: str, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema that a local reference (#/$defs/Name) names."""
    at: Any = root
    if not ref.startswith("#/"):
        return None
    for step in ref[2:].split("/"):
        at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    return at if isinstance(at, Mapping) else None


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next(name for name, types in _TYPES.items() if isinstance(value, types))


def is_text(schema: Mapping[str, Any] | None, root: Mapping[str, Any]) -> bool:
    """Whether every value of this schema is a string, so that text can be told before all of it is there."""
    return types_of(schema, root) == {"string"}


def to_json(text: str, schema: Mapping[str, Any] | None, root: Mapping[str, Any]) -> str:
    """JSON of a value written as text: of a wanted type when the text can be read so, else a string."""
    types = types_of(schema, root)
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    value = _read(text.strip())
    if value is not _NOTHING and (not types or _fits(value, types)):
        return text.strip() if text.strip() not in _WORDS else json.dumps(value)
    return json.dumps(text, ensure_ascii=False)


class _Nothing:
    pass


_NOTHING = _Nothing()


def _read(text: str) -> object:
    """The JSON value, or `_NOTHING`."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _NOTHING


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _fits(value: object, types: frozenset[str]) -> bool:
    name = _type_of(value)
    if name == "integer" and "number" in types:
        return True
    if name == "number" and "number" not in types:
        return False
    return name in types
