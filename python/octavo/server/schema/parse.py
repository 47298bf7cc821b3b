"""JSON bodies to frozen dataclasses, by their type hints: the hints are the table, nothing else is.

null means "not given". Unknown fields are ignored here (unknown.py names them in the log). A wrong type is a
`RequestError` that names the field; ranges are checked by who owns the value (`SamplingParams`).
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from octavo.errors import RequestError

T = TypeVar("T")
Check = Callable[[Any, str], Any]
"""(value, path of the field) -> value of the wanted type, or RequestError."""

# No list of the API is longer: token ids beyond every context, or a mistake.
MAX_ITEMS = 2**20
# No body has more commas: parsing it would hold up everybody else.
MAX_VALUES = 4 * MAX_ITEMS
TOO_MANY = "too_many_values"
# Lists and objects within each other: schemas and tools of real use have less than half of it.
MAX_DEPTH = 256
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "an object"}


def load_json(body: bytes) -> dict[str, Any]:
    """The body's JSON object. `RequestError` says what is wrong with it."""
    value = load_value(body, "the body")
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return value


def load_value(body: bytes, what: str) -> Any:
    """Any JSON value within the bounds of requests. `RequestError` says what is wrong with `what`."""
    if len(body) > MAX_VALUES and body.count(b",") > MAX_VALUES:
        raise RequestError(f"{what} has more than {MAX_VALUES} values", code=TOO_MANY)
    try:
        text = body.decode("utf-8-sig")  # files of Windows begin with a mark that RFC 8259 lets readers ignore
        value = json.loads(text)
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{what} is not UTF-8: bad byte at offset {error.start}", code="invalid_json") from error
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} has half of a surrogate pair in a string", code="invalid_json") from error
    except json.JSONDecodeError as error:
        message = f"{what} is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise RequestError(message, code="invalid_json") from error
    except RecursionError as error:
        raise RequestError(f"{what} is nested too deeply", code="invalid_json") from error
    except ValueError as error:  # integers of thousands of digits
        raise RequestError(f"{what} is not JSON: {error}", code="invalid_json") from error
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and depth_of(value) > MAX_DEPTH:
        raise RequestError(f"{what} is nested deeper than {MAX_DEPTH} levels", code="invalid_json")
    return value


def depth_of(value: Any) -> int:
    """How many lists and objects are within each other, level by level (no recursion), up to just beyond the limit."""
    level = [value] if isinstance(value, list | dict) else []
    depth = 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
    return depth


def show(value: object) -> str:
    """A short form of a value for messages."""
    if isinstance(value, str):
        return repr(value[:40]) + ("…" if len(value) > 40 else "")
    if isinstance(value, list | dict):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    return json.dumps(value)[:40]


def _refuse(path: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"{path} must be {wanted}, got {show(value)}", param=path)


def _scalar(cls: type) -> Check:
    def check(value: Any, path: str) -> Any:
        if type(value) is not cls:
            raise _refuse(path, _NAMES[cls], value)
        return value

    return check


def _float(value: Any, path: str) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise _refuse(path, _NAMES[float], value)
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"{path} must be a finite number", param=path) from None


def _anything(value: Any, path: str) -> Any:
    return value


def _list(item: Check) -> Check:
    def check(value: Any, path: str) -> list[Any]:
        if type(value) is not list:
            raise _refuse(path, "a list", value)
        if len(value) > MAX_ITEMS:
            message = f"{path} has {len(value)} items; at most {MAX_ITEMS} are read"
            raise RequestError(message, param=path, code=TOO_MANY)
        return [item(element, path) for element in value]

    return check


def _mapping(key: type, item: Check) -> Check:
    def check(value: Any, path: str) -> dict[Any, Any]:
        if type(value) is not dict:
            raise _refuse(path, "an object", value)
        if key is not int:
            return {name: item(element, path) for name, element in value.items()}
        return {_integer_key(name, path): item(element, path) for name, element in value.items()}

    return check


def _integer_key(name: str, path: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", name):
        raise RequestError(f"{path}: {show(name)} is not a token id", param=path)
    return int(name)


def _union(members: tuple[Any, ...]) -> Check:
    checks = [check_for(member) for member in members]
    wanted = " or ".join(describe(member) for member in members)

    def check(value: Any, path: str) -> Any:
        for member in checks:
            try:
                return member(value, path)
            except RequestError as error:
                if error.code == TOO_MANY:
                    raise
        raise _refuse(path, wanted, value)

    return check


def describe(hint: Any) -> str:
    """A type hint in the words of error messages."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(describe(member) for member in arguments)
    if typing.get_origin(hint) in (list, Sequence):
        inner = describe(arguments[0])
        return "a list of " + {"an integer": "integers", "a string": "strings", "a number": "numbers"}.get(inner, inner)
    return _NAMES.get(hint, "an object")


@cache
def check_for(hint: Any) -> Check:
    """The check of a type hint: scalars, lists, mappings, unions (None left out: null never gets here), dataclasses."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return _anything
    if hint is float:
        return _float
    if origin in (types.UnionType, typing.Union):
        members = tuple(member for member in typing.get_args(hint) if member is not type(None))
        return check_for(members[0]) if len(members) == 1 else _union(members)
    if origin in (list, Sequence):
        return _list(check_for(typing.get_args(hint)[0]))
    if origin in (dict, Mapping):
        key, item = typing.get_args(hint)
        return _mapping(key, check_for(item))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return lambda value, path: parse(hint, _scalar(dict)(value, path), f"{path}.")
    return _scalar(hint)


@cache
def fields_of(cls: type[Any]) -> dict[str, Check]:
    """Field name -> check, for a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: check_for(hints[field.name]) for field in dataclasses.fields(cls)}


def pick(checks: Mapping[str, Check], body: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The checked values of those fields that the body gives."""
    return {name: check(body[name], prefix + name) for name, check in checks.items() if body.get(name) is not None}


def parse(cls: type[T], body: Mapping[str, Any], prefix: str = "") -> T:
    """A `cls` from a JSON object; fields without a default are required."""
    target: Any = cls  # a dataclass, which mypy can't say of T
    values = pick(fields_of(target), body, prefix)
    for field in dataclasses.fields(target):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise RequestError(f"{prefix}{field.name} is required", param=prefix + field.name)
    return cls(**values)
