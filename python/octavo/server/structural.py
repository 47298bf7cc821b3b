"""The pieces that structural tags are made of (see `structured_outputs` in README.md), as functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Form = Mapping[str, Any]
"""What text must look like."""


ANY_TEXT: Form = {"type": "any_text"}
_SLASHES = re.compile(r"(\\.)|/", re.DOTALL)
"""What is escaped, and slashes that are not."""


def text(value: str) -> Form:
    """Exactly this text; special tokens in it are those tokens."""
    return {"type": "const_string", "value": value}


def schema(value: Any) -> Form:
    """JSON of a schema."""
    return {"type": "json_schema", "json_schema": value}


def pattern(value: str) -> Form:
    """Text that a regular expression matches."""
    return {"type": "regex", "pattern": value}


def pattern_within(value: str, bounds: str) -> Form:
    """Text that two regular expressions match."""
    terms = " & ".join(_in_slashes(f"/(?s:{term})/", 1) for term in (value, bounds))
    return {"type": "grammar", "grammar": f"start: TEXT\nTEXT: {terms}"}


def text_but(beginning: str, marks: Sequence[str]) -> Form:
    """Any text that does not begin as this expression says, and in which no mark stands."""
    out = [rf"~/{beginning}(?s:.*)/", *(rf"~/(?s:.*){re.escape(mark)}(?s:.*)/" for mark in marks)]
    terms = " & ".join(["/(?s:.*)/", *(_in_slashes(term, 2) for term in out)])
    return {"type": "grammar", "grammar": f"start: TEXT\nTEXT: {terms}"}


def _in_slashes(terminal: str, begin: int) -> str:
    """A terminal of Lark whose expression, from `begin` on, may have slashes in it, escaped ones too."""
    body = _SLASHES.sub(lambda found: found[1] or r"\/", terminal[begin:-1])
    return terminal[:begin] + body + terminal[-1]


def sequence(*elements: Form) -> Form:
    """One after another."""
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def either(*elements: Form) -> Form:
    """One of them."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Form, end: str) -> Form:
    """Content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def free(begin: str, end: str) -> Form:
    """Any text between two texts."""
    return tag(begin, {"type": "any_text"}, end)


def several(tags: Sequence[Form], separator: str, *, only_one: bool) -> Form:
    """At least one of these tags, with a separator between them."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }


def triggered(triggers: Sequence[str], tags: Sequence[Form], *, only_one: bool) -> Form:
    """Any text, but what begins with a trigger is one of these tags."""
    return {
        "type": "triggered_tags",
        "triggers": list(triggers),
        "tags": list(tags),
        "at_least_one": False,
        "stop_after_first": only_one,
    }
