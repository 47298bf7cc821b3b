"""The Jinja environment of chat templates: sandboxed, bounded in time and size, with the extensions that model
repositories use. Templates come from model files, so they are treated as foreign code.

Not here: where templates come from and what they are given (chat_template.py).
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDER_S = 2.0
MAX_RENDER_CHARS = 64 * 1024 * 1024
MAX_REPEATED_CHARS = 64 * 1024
TICK = "__tick__"
_TICKS_PER_CLOCK_READ = 1024
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_WIDE_FIELD = re.compile(r"\{[^{}]*:[^{}]*(\d{4}|\{)")


class TemplateLimitError(TemplateError):
    """A template ran too long or wrote too much."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training masks; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Ticks(Extension):
    """Puts a call of the render's tick function at the head of every loop body, so that no loop outlives the limit."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        in_for = False
        previous = ""
        for token in stream:
            yield token
            if previous == "block_begin" and token.type == "name" and token.value == "for":
                in_for = True
            elif in_for and token.type == "block_end":
                in_for = False
                line = token.lineno
                for kind, value in (
                    ("variable_begin", "{{"),
                    ("name", TICK),
                    ("lparen", "("),
                    ("rparen", ")"),
                    ("variable_end", "}}"),
                ):
                    yield Token(line, kind, value)
            previous = token.type


def _repeated_size(value: object, times: object) -> int:
    """Items of `value * times`; 0 when that is no repetition."""
    if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
        return len(value) * times
    return 0


def _grown_size(name: str, value: Any, arguments: tuple[Any, ...]) -> int:
    """Characters that a method or filter of strings makes out of a few; 0 for one that does not grow its input."""
    if name == "replace" and isinstance(value, str) and len(arguments) > 1:
        return value.count(str(arguments[0])) * len(str(arguments[1]))
    parts = arguments[0] if isinstance(value, str) and name == "join" and arguments else value
    if name == "join" and isinstance(parts, list | tuple):
        return sum(len(part) for part in parts if isinstance(part, str))
    return 0


def _check_growth(name: str, value: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse a method or filter that makes a huge string: by a number (widths, counts) or by its arguments."""
    numbers = (argument for argument in (*arguments, *named.values()) if isinstance(argument, int))
    if any(number > MAX_REPEATED_CHARS for number in numbers):
        raise SecurityError(f"a template may not give {name} a number above {MAX_REPEATED_CHARS}")
    if _grown_size(name, value, arguments) > MAX_RENDER_CHARS:
        raise SecurityError(f"a template may not make more than {MAX_RENDER_CHARS} characters with {name}")
    wide = _WIDE_FORMAT.search(value) or _WIDE_FIELD.search(value) if isinstance(value, str) else None
    if name.startswith("format") and wide:
        raise SecurityError("a template may not format with a width above 999")


def _checked(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """A filter behind `_check_growth`; filters that ask for the environment or context get it before the value."""

    @functools.wraps(apply)  # keeps what Jinja has noted on it
    def checked(*arguments: Any, **named: Any) -> Any:
        first = 1 if hasattr(apply, "jinja_pass_arg") else 0
        _check_growth(name, arguments[first], arguments[first + 1 :], named)
        return apply(*arguments, **named)

    return checked


class _Environment(ImmutableSandboxedEnvironment):
    """Refuses operators and calls that make huge values from small ones."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and max(_repeated_size(left, right), _repeated_size(right, left)) > MAX_REPEATED_CHARS:
            raise SecurityError(f"a template may not repeat a value to more than {MAX_REPEATED_CHARS} items")
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise SecurityError("a template may not raise to a power above 64")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a template may not format with a width above 999")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        value = getattr(method, "__self__", None)
        if isinstance(value, str | bytes):
            _check_growth(method.__name__, value, arguments, named)
        return super().call(context, function, *arguments, **named)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: no HTML escapes, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> ImmutableSandboxedEnvironment:
    """An environment whose templates must be rendered with `render`."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _Generation, _Ticks],
    )
    environment.filters["tojson"] = _tojson
    environment.filters = {name: _checked(name, apply) for name, apply in environment.filters.items()}
    del environment.globals["lipsum"]  # writes as much as it is told
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _make_tick(deadline_s: float) -> Callable[[], str]:
    count = 0

    def tick() -> str:
        nonlocal count
        count += 1
        if count % _TICKS_PER_CLOCK_READ == 0 and time.monotonic() > deadline_s:
            raise TemplateLimitError(f"the chat template ran for more than {MAX_RENDER_S:g} s")
        return ""

    return tick


def render(template: Any, variables: dict[str, Any], *, max_chars: int = MAX_RENDER_CHARS) -> str:
    """Render a template of `make_environment`. `TemplateError` when it fails, runs too long or writes too much."""
    deadline_s = time.monotonic() + MAX_RENDER_S
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate({**variables, TICK: _make_tick(deadline_s)}):
            pieces.append(piece)
            size += len(piece)
            if size > max_chars:
                raise TemplateLimitError(f"the chat template wrote more than {max_chars} characters")
    except TemplateError:
        raise
    except RecursionError:
        raise TemplateLimitError("the chat template or its input is nested too deeply") from None
    except Exception as error:  # what a template does with its input is not ours to foresee
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    return "".join(pieces)
