"""Errors in the words of an endpoint, where its fields are called otherwise than the engine calls them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from octavo.errors import RequestError


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
