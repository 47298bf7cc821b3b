"""Fields of bodies that nobody reads: ignored, as clients of other servers send many, but named in the log, once each.

Not here: fields that would change the answer, which are refused (refused.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from octavo.server.schema.parse import fields_of, parse

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_NAMES = 100
"""So many are named; clients may invent others for ever."""
MAX_CHARS = 64

_named: set[str] = set()


def parse_body(cls: type[T], body: Mapping[str, Any], also: Iterable[str] = ()) -> T:
    """A whole body as `cls`; `also`: names of fields that are read elsewhere."""
    target: Any = cls  # a dataclass, which mypy can't say of T
    unknown = body.keys() - fields_of(target).keys()
    for name in sorted(unknown.difference(also)) if unknown else ():
        note_once(f"the field {name[:MAX_CHARS]!r}")
    return parse(cls, body)


def note_once(what: str) -> None:
    """Say in the log that a request has something that nobody reads."""
    if what in _named or len(_named) == MAX_NAMES:
        return
    _named.add(what)
    logger.warning("a request has %s, which is not read (said once a name)", what)
    if len(_named) == MAX_NAMES:
        logger.warning("%d parts of requests were not read; others are not named", MAX_NAMES)
