"""What `--speculative-config` says: guess tokens, verify them in one step, and keep those that sampling agrees with.

Tokens are the same with and without it. Not here: drafting and when it pays (rust/core/src/speculation), verification
(the runners).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError

FIELD = "speculative_config"
FLAG = "--speculative-config"
KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
"""Of the JSON object, as other engines name them."""
MOST = 64
"""The greatest number that any of them may be."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts are made from a sequence's own tokens (prompt lookup)."""

    num_tokens: int
    """Most drafted tokens of a sequence in a step."""
    lookup_min: int
    """So many of the newest tokens must have come before."""
    lookup_max: int
    """Matches are compared up to this length."""
    is_measured: bool
    """Drafts only where they pay, as measured; else wherever there is one."""

    def __str__(self) -> str:
        grams = f"what followed the newest {self.lookup_min} to {self.lookup_max} tokens before"
        when = "where it pays" if self.is_measured else "always"
        return f"up to {self.num_tokens} tokens a sequence, {grams}; {when}"


AUTO = Speculation(num_tokens=7, lookup_min=2, lookup_max=8, is_measured=True)
NGRAM = Speculation(num_tokens=5, lookup_min=2, lookup_max=5, is_measured=False)
METHODS: dict[str, Speculation | None] = {"auto": AUTO, "ngram": NGRAM, "off": None}


def read_speculation(value: str | Mapping[str, Any]) -> Speculation | None:
    """A method's name, or an object (as JSON or as a mapping) of `KEYS`; None: no drafts. Errors: ConfigError."""
    given = _mapping(value)
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise ConfigError(f"{FLAG}: {unknown[0]!r} is none of {', '.join(KEYS)}", FIELD)
    method = given.get("method", "ngram")
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"{FLAG}: method {method!r} is none of {', '.join(METHODS)}", FIELD)
    usual = METHODS[method]
    if usual is None:
        return None
    num_tokens = _number(given, "num_speculative_tokens", usual.num_tokens)
    longest = _number(given, "prompt_lookup_max", usual.lookup_max)
    shortest = _number(given, "prompt_lookup_min", min(usual.lookup_min, longest))
    if shortest > longest:
        if "prompt_lookup_max" in given:
            raise ConfigError(f"{FLAG}: prompt_lookup_min {shortest} is above prompt_lookup_max {longest}", FIELD)
        longest = shortest
    return Speculation(num_tokens, shortest, longest, usual.is_measured)


def _mapping(value: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("{"):
        return {"method": value}
    try:
        found: dict[str, Any] = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{FLAG}: {value!r} is no JSON object: {error}", FIELD) from None
    return found


def _number(given: Mapping[str, Any], key: str, usual: int) -> int:
    number = given.get(key, usual)
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST:
        raise ConfigError(f"{FLAG}: {key} {number!r} is no number from 1 to {MOST}", FIELD)
    return number


def without_drafts(value: str | Mapping[str, Any], runner: str) -> str:
    """The value for a runner that takes no drafts. Errors: ConfigError when it asks for them."""
    speculation = read_speculation(value)
    if speculation is not None and not speculation.is_measured:
        raise ConfigError(f"{FLAG}: {runner} verifies no drafts; use auto or off, or --runner embedded on a CPU", FIELD)
    return "off"
