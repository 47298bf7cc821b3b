"""Runs a parser over text that is cut in a given way, and joins what it finds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from octavo.server.parts import CallArguments, CallStart, Content, Parser, Part, Reasoning


@dataclass
class Read:
    """What was found."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str | None, str]] = field(default_factory=list)
    """(name, id, arguments)"""


def join(parts: Iterable[Part]) -> Read:
    found = Read()
    for part in parts:
        if isinstance(part, Content):
            found.content += part.text
        elif isinstance(part, Reasoning):
            found.reasoning += part.text
        elif isinstance(part, CallStart):
            found.calls.append((part.name, part.id, ""))
        else:
            assert isinstance(part, CallArguments)
            name, own_id, arguments = found.calls[-1]
            found.calls[-1] = (name, own_id, arguments + part.text)
    return found


def read(parser: Parser, pieces: Iterable[str]) -> Read:
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return join([*parts, *parser.finish()])


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def all_cuts(text: str) -> Iterator[list[str]]:
    """In two at every place, into single characters, and into three on a grid."""
    yield list(text)
    for place in range(len(text) + 1):
        yield cut(text, [place])
    step = max(1, len(text) // 12)
    for first in range(0, len(text), step):
        for second in range(first, len(text), step):
            yield cut(text, [first, second])
