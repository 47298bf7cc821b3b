"""What a request says of the form of its answer: OpenAI's `response_format`, or `structured_outputs`; not both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import RequestError
from octavo.server.schema.parse import show
from octavo.server.schema.words import renamed
from octavo.structured_outputs import PARAM, StructuredOutputs

FIELD = "response_format"
WORDS = {PARAM: FIELD, f"{PARAM}.json": f"{FIELD}.json_schema.schema"}
"""The engine's name of a constraint -> what a request with `response_format` calls it."""


def constraint(body: Mapping[str, Any]) -> StructuredOutputs | None:
    """The constraint on the answer. `RequestError` names the field at fault."""
    format_ = body.get(FIELD)
    return beside(body, None if format_ is None else from_format(format_), FIELD)


def beside(body: Mapping[str, Any], wanted: StructuredOutputs | None, field: str) -> StructuredOutputs | None:
    """The constraint that an API's own `field` asks for, or else that of `structured_outputs`."""
    outputs = body.get(PARAM)
    if outputs is None:
        return wanted
    if not isinstance(outputs, Mapping):
        raise RequestError(f"{PARAM} must be an object, got {show(outputs)}", PARAM)
    if wanted is not None:
        raise RequestError(f"{field} and {PARAM} are both given: give one", PARAM)
    return StructuredOutputs.from_mapping(outputs)


def from_format(format_: object) -> StructuredOutputs | None:
    """The constraint that a `response_format` stands for; None for plain text."""
    if not isinstance(format_, Mapping):
        raise RequestError(f"{FIELD} must be an object, got {show(format_)}", FIELD)
    read = KINDS.get(str(format_.get("type")))
    if read is None:
        kinds = ", ".join(KINDS)
        raise RequestError(f"{FIELD}.type must be one of {kinds}, got {show(format_.get('type'))}", FIELD)
    with renamed(WORDS):
        return read(format_)


def _text(_: Mapping[str, Any]) -> None:
    return None


def _json_object(_: Mapping[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(json_object=True)


def _json_schema(format_: Mapping[str, Any]) -> StructuredOutputs:
    given = format_.get("json_schema")
    if not isinstance(given, Mapping):
        raise RequestError(f"{FIELD}.json_schema must be an object with a schema, got {show(given)}", FIELD)
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"{FIELD}.json_schema.schema must be an object, got {show(schema)}", FIELD)
    for name, kind in (("name", str), ("strict", bool)):
        if not isinstance(given.get(name), kind | None):
            raise RequestError(f"{FIELD}.json_schema.{name} must be a {kind.__name__}", FIELD)
    return StructuredOutputs(json=schema)


def _structural_tag(format_: Mapping[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(structural_tag=format_)


KINDS: Mapping[str, Callable[[Mapping[str, Any]], StructuredOutputs | None]] = {
    "text": _text,
    "json_object": _json_object,
    "json_schema": _json_schema,
    "structural_tag": _structural_tag,
}
