"""Answers that are free text or calls, where calls must be right: what strict tools make of an answer.

A grammar can't let a text go on and then find that it was a call, so free text leaves out exactly what the format's
parser takes for the beginning of one: its marks, wherever they stand, or, in formats without marks, the way a message
begins that is a call. Not here: how one call is written (tools/shape.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.server.structural import Form, either, pattern, sequence, several, tag, text, text_but, triggered
from octavo.server.tools.base import Tools
from octavo.server.tools.shape import CallShape, required_parameters

Offered = Mapping[str, Mapping[str, Any]]
"""Name of a function -> the schema that its arguments must have."""
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


def when_called(shape: CallShape, tools: Tools, *, only_one: bool, not_before: Sequence[str] = ()) -> Form:
    """Any text; calls in it are right where their tool is strict, and JSON objects elsewhere.

    Args:
        shape: How calls are written.
        not_before: What may stand before such text, and so is not its beginning.
    """
    offered = {
        name: required_parameters(tools, name) if function.get("strict") else ANY_ARGUMENTS
        for name, function in tools.functions.items()
    }
    only_one = only_one or shape.one_call
    if shape.answer is not None:
        return shape.answer([shape.call(name, parameters) for name, parameters in offered.items()])
    ways = (shape, *shape.also)
    if shape.instead:
        return instead_of_text(ways, offered, only_one=only_one, not_before=not_before)
    return among_text(ways, offered, only_one=only_one)


def among_text(ways: Sequence[CallShape], offered: Offered, *, only_one: bool) -> Form:
    """Free text in which a mark begins calls."""
    tags: list[Form] = []
    for way in ways:
        calls = [way.call(name, parameters) for name, parameters in offered.items()]
        if way.before:
            tags.append(tag(way.before, several(calls, way.between, only_one=only_one), way.after))
        else:
            tags += calls
    return triggered([way.trigger for way in ways], tags, only_one=only_one)


def instead_of_text(ways: Sequence[CallShape], offered: Offered, *, only_one: bool, not_before: Sequence[str]) -> Form:
    """Calls, or free text, perhaps with a mark and calls behind it."""
    own, *_ = ways
    begins = [*(re.escape(begin) for begin in not_before), own.instead]
    free = text_but(rf"\s*({'|'.join(begins)})", [own.trigger] if own.trigger else [])
    if own.trigger:
        calls = sequence(*_texts(own.before), _calls(own, offered, only_one), *_texts(own.after + own.closing))
        free = sequence(free, either(sequence(text(own.trigger), calls), text("")))
    return either(*(_message(way, offered, only_one) for way in ways), free)


def _calls(way: CallShape, offered: Offered, only_one: bool) -> Form:
    return several([way.call(name, parameters) for name, parameters in offered.items()], way.between, only_one=only_one)


def _message(way: CallShape, offered: Offered, only_one: bool) -> Form:
    """Calls from the beginning of a message on. All up to the first call's arguments is one expression, so that calls
    and free text part at one place."""
    first = either(
        *(
            sequence(pattern(_beginning(way.before + way.begin_of(name))), way.arguments(parameters), *_texts(way.end))
            for name, parameters in offered.items()
        )
    )
    further = sequence(text(way.between), _calls(way, offered, only_one))
    more = [] if only_one else [either(further, text(""))]
    return sequence(first, *more, *_texts(way.after))


def _beginning(begin: str) -> str:
    """A text with blanks before it, and blanks in it as the model likes them."""
    words = [re.escape(word) for word in re.split(r'[ \n]+|(?<=[\[{])(?=[{"])', begin)]
    return r"\s{0,8}" + r"\s{0,2}".join(words)


def _texts(value: str) -> list[Form]:
    return [text(value)] if value else []
