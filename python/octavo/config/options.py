"""Fields of the config tree as data: what the command line, the README and the checks read of an option.

Not here: the options themselves (sections.py), and contradictions between them (build.py).
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import Field, asdict, dataclass, fields
from functools import cache
from typing import Any

from octavo.config.sections import ENGINE_SECTIONS, SECTIONS, EngineConfig, ServerConfig
from octavo.errors import ConfigError

MAX_INT = 2**63 - 1
"""No number of an option is greater; those that the core keeps in fewer bits have a `high`."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a section, as the command line and README.md show it."""

    name: str
    section: str
    type: Any
    default: Any
    help: str
    choices: tuple[str, ...]
    low: float | None
    high: float | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _default(f: Field[Any]) -> Any:
    return f.default_factory() if callable(f.default_factory) else f.default


@cache
def section_options(section: str) -> tuple[Option, ...]:
    """The options of a section, a name of `SECTIONS`, in order."""
    cls = SECTIONS[section]
    hints = typing.get_type_hints(cls)
    return tuple(Option(f.name, section, hints[f.name], _default(f), **f.metadata) for f in fields(cls))


def engine_options() -> Iterator[Option]:
    """Options of all engine sections, in order."""
    for section in ENGINE_SECTIONS:
        yield from section_options(section)


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a Python value is of an option's type (an int serves as float, a bool never as int)."""
    for member in _members(hint):
        if typing.get_origin(member) is list:
            inner = typing.get_args(member)[0]
            if isinstance(value, list | tuple) and all(_fits(v, inner) for v in value):
                return True
        elif member is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif member is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return True
        elif isinstance(value, typing.get_origin(member) or member):
            return True
    return False


def check_value(opt: Option, value: Any, shown: str | None = None) -> None:
    """Raise `ConfigError` when a value has the wrong type, is out of range, or is no choice of the option, which the
    message calls by its flag, or as `shown`."""
    name = shown or opt.flag
    if not _fits(value, opt.type):
        raise ConfigError(f"{name}: {value!r} is not a valid value ({opt.help})", opt.name)
    if opt.choices and value not in opt.choices:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(opt.choices)}", opt.name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if opt.low is not None and not value >= opt.low:
            raise ConfigError(f"{name}: {value} is below the least value, {opt.low:g}", opt.name)
        high = MAX_INT if opt.high is None and isinstance(value, int) else opt.high
        if high is not None and not value <= high:
            raise ConfigError(f"{name}: {value} is above the greatest value, {high}", opt.name)


def nearest(name: str, known: list[str]) -> str:
    """' (did you mean X?)' or ''."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def changed(config: EngineConfig | ServerConfig) -> dict[str, Any]:
    """The values that differ from the defaults, by option."""
    out: dict[str, Any] = {}
    trees = asdict(config)
    sections = {"server": trees} if isinstance(config, ServerConfig) else trees
    for section, values in sections.items():
        for opt in section_options(section):
            if values[opt.name] != opt.default:
                out[opt.name] = values[opt.name]
    return out
