"""Errors in the words of an endpoint, where its fields are called otherwise than the engine calls them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from octavo.errors import RequestError

T = TypeVar("T")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """`RequestError`s that come out name the endpoint's fields; `names` maps from the engine's."""
    try:
        yield
    except RequestError as error:
        param = names.get(error.param or "")
        if param is None:
            raise
        raise RequestError(_said(str(error), str(error.param), names), param=param, code=error.code) from None


def _said(message: str, param: str, names: Mapping[str, str]) -> str:
    """A message with the endpoint's name of the field, or of the part of it (`structured_outputs.json`), that it
    begins with."""
    known = (name for name in names if name == param or name.startswith(f"{param}."))
    for name in sorted(known, key=len, reverse=True):
        if re.match(rf"{re.escape(name)}\b", message):
            return names[name] + message[len(name) :]
    return message


def all_renamed(source: AsyncIterator[T], names: Mapping[str, str]) -> AsyncIterator[T]:
    """The same items; errors on the way are said in the endpoint's words."""
    return _renamed_items(source, names) if names else source


async def _renamed_items(source: AsyncIterator[T], names: Mapping[str, str]) -> AsyncIterator[T]:
    with renamed(names):
        async for item in source:
            yield item
