"""Errors in the words of an endpoint, where its fields are called otherwise than the engine calls them."""

from __future__ import annotations

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
        message = str(error)
        if message.startswith(f"{error.param} "):
            message = param + message.removeprefix(str(error.param))
        raise RequestError(message, param=param, code=error.code) from None


async def all_renamed(source: AsyncIterator[T], names: Mapping[str, str]) -> AsyncIterator[T]:
    """The same items; errors on the way are said in the endpoint's words."""
    with renamed(names):
        async for item in source:
            yield item
