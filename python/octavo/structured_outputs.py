"""What an output must look like: one constraint and its options, validated on construction, JSON on the wire.

Field names are vLLM's. Only form and size are checked here; whether a schema, expression or grammar can be used, the
engine says when it compiles it (rust/core/src/grammar), before anything is generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from octavo.errors import RequestError

PARAM = "structured_outputs"
MAX_BYTES = 512 * 1024
"""Of the whole constraint, as JSON."""
MAX_REGEX_CHARS = 16 * 1024
MAX_CHOICES = 8192
MAX_START_CHARS = 1024
MAX_START_IDS = 64


def _refuse(field: str, message: str) -> RequestError:
    return RequestError(f"{PARAM}.{field} {message}", PARAM)


def _given(value: object) -> bool:
    return value is not None and value is not False


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A constraint on the output. Exactly one of the first six is given.

    Attributes:
        json: JSON Schema (2020-12) as a dict or as text; True: any JSON value.
        json_object: Any JSON object.
        regex: The whole output matches; the syntax of Rust's regex crate, without look-around.
        choice: The output is one of these.
        grammar: GBNF or EBNF (rules `name ::= …`, start at `root`), or Lark (rules `name: …`, start at `start`; see the
            README for what Lark understands here).
        structural_tag: Text with tagged parts, as a dict or as text: {"structures", "triggers"} or {"format"}.
        disable_any_whitespace: No whitespace between the tokens of JSON.
        whitespace_pattern: What may stand between the tokens of JSON; default: a blank, or a line break and up to 16
            blanks or tabs.
        disable_additional_properties: Objects that list properties and don't mention others take no others.
        start_after: Text is free until this text, or these token ids, have been generated.

    Raises:
        RequestError: `structured_outputs` is malformed; the message names the field.
    """

    json: str | bool | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = False
    start_after: str | Sequence[int] | None = None

    def __post_init__(self) -> None:
        given = [name for name in FORMS if _given(getattr(self, name))]
        if len(given) != 1:
            found = f"got {' and '.join(given)}" if given else "got none"
            raise RequestError(f"{PARAM} takes exactly one of {', '.join(FORMS)}; {found}", PARAM)
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool | None):
                raise _refuse(name, f"must be true or false, got {getattr(self, name)!r}")
        for name in ("json", "structural_tag"):
            self._check_json(name)
        for name in ("regex", "grammar", "whitespace_pattern"):
            self._check_text(name)
        self._check_choice()
        self._check_start()
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _refuse("whitespace_pattern", "is of no use with disable_any_whitespace")
        self.to_wire()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From a request's own words; None counts as not given."""
        unknown = [str(name) for name in values if name not in FIELDS]
        if unknown:
            raise RequestError(f"{PARAM} has no field {unknown[0]!r}; it has {', '.join(FIELDS)}", PARAM)
        return cls(**{name: value for name, value in values.items() if value is not None})

    def _check_json(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise _refuse(name, f"is not JSON: {error}") from None
            if isinstance(value, str):
                raise _refuse(name, "must be an object, got text within text")
        ok = value is None or isinstance(value, Mapping) or (name == "json" and isinstance(value, bool))
        if not ok:
            raise _refuse(name, f"must be an object, got {type(value).__name__}")

    def _check_text(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, str) or not value.strip():
            raise _refuse(name, "must be text that is not empty")
        if name != "grammar" and len(value) > MAX_REGEX_CHARS:
            raise _refuse(name, f"has {len(value)} characters; at most {MAX_REGEX_CHARS} are taken")

    def _check_choice(self) -> None:
        choice = self.choice
        if choice is None:
            return
        if isinstance(choice, str) or not isinstance(choice, Sequence) or not all(isinstance(c, str) for c in choice):
            raise _refuse("choice", "must be a list of strings")
        if not 1 <= len(choice) <= MAX_CHOICES:
            raise _refuse("choice", f"has {len(choice)} entries; 1 to {MAX_CHOICES} are taken")

    def _check_start(self) -> None:
        start = self.start_after
        if start is None:
            return
        if isinstance(start, str):
            if not 1 <= len(start) <= MAX_START_CHARS:
                raise _refuse("start_after", f"must have 1 to {MAX_START_CHARS} characters")
        elif not isinstance(start, Sequence) or not all(type(i) is int and 0 <= i < 2**31 for i in start):
            raise _refuse("start_after", "must be text or a list of token ids")
        elif not 1 <= len(start) <= MAX_START_IDS:
            raise _refuse("start_after", f"must have 1 to {MAX_START_IDS} token ids")

    def to_wire(self) -> bytes:
        """What the engine reads (rust/core/src/grammar/spec.rs). Equal constraints give equal bytes."""
        form = next(name for name in FORMS if _given(getattr(self, name)))
        value = getattr(self, form)
        if form in ("json", "structural_tag") and isinstance(value, str):
            value = json.loads(value)
        spec: dict[str, Any] = {form: list(value) if form == "choice" else value}
        start = self.start_after
        options = {
            "compact": self.disable_any_whitespace,
            "whitespace": self.whitespace_pattern,
            "closed": self.disable_additional_properties,
            "start_after": start if start is None or isinstance(start, str) else list(start),
        }
        spec |= {name: option for name, option in options.items() if _given(option)}
        try:
            wire = json.dumps(spec, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _refuse(form, f"can't be written as JSON: {error}") from None
        if len(wire) > MAX_BYTES:
            raise _refuse(form, f"has {len(wire)} bytes as JSON; at most {MAX_BYTES} are taken")
        return wire


FIELDS = tuple(field.name for field in fields(StructuredOutputs))
FORMS = FIELDS[:6]
