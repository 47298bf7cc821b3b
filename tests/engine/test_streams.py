"""Streams alone: batches are merged, every way out of the loop ends the request once, errors come last."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import pytest

from octavo._core import Delta
from octavo.engine.streams import Stream
from octavo.errors import EngineDeadError


@dataclass
class Piece:
    """As much of a delta as a stream looks at, which is nothing."""

    number: int


def push(stream: Stream, *numbers: int) -> None:
    for number in numbers:
        stream.push(cast(Delta, Piece(number)))


def numbers(batch: list[Any]) -> list[int]:
    return [piece.number for piece in batch]


async def read_into(seen: list[list[int]], stream: Stream) -> None:
    async for batch in stream:
        seen.append(numbers(batch))


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def stream(ended: list[str]) -> Stream:
    return Stream("r", lambda stream: ended.append(stream.request_id))


async def test_a_slow_reader_gets_merged_batches(stream: Stream, ended: list[str]) -> None:
    push(stream, 1, 2, 3)
    batches = []
    async for batch in stream:
        batches.append(numbers(batch))
        if len(batches) == 1:
            push(stream, 4, 5)
            stream.finish(None)
    assert batches == [[1, 2, 3], [4, 5]]
    assert ended == ["r"]


async def test_a_waiting_reader_is_woken(stream: Stream) -> None:
    async def read() -> list[list[int]]:
        return [numbers(batch) async for batch in stream]

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)  # let the reader wait
    push(stream, 1)
    push(stream, 2)
    await asyncio.sleep(0)
    push(stream, 3)
    stream.finish(None)
    assert [n for batch in await reader for n in batch] == [1, 2, 3]


async def test_an_error_comes_after_what_was_sent(stream: Stream, ended: list[str]) -> None:
    push(stream, 1)
    stream.finish(EngineDeadError("gone"))
    seen: list[list[int]] = []
    with pytest.raises(EngineDeadError, match="gone"):
        await read_into(seen, stream)
    assert seen == [[1]]
    assert ended == ["r"]


async def test_break_ends_the_request_without_further_ado() -> None:
    ended = asyncio.Event()
    stream = Stream("r", lambda _: ended.set())
    push(stream, 1)
    async for _ in stream:
        break
    await asyncio.wait_for(ended.wait(), 5)


async def test_an_exception_in_the_body_ends_the_request(stream: Stream, ended: list[str]) -> None:
    push(stream, 1)

    async def read() -> None:
        async with aclosing(cast(Any, stream.__aiter__())) as batches:
            async for _ in batches:
                raise KeyError

    with pytest.raises(KeyError):
        await read()
    assert ended == ["r"]


async def test_cancellation_ends_the_request(stream: Stream, ended: list[str]) -> None:
    async def read() -> None:
        async for _ in stream:
            pass

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert ended == ["r"]


async def test_close_is_final_and_happens_once(stream: Stream, ended: list[str]) -> None:
    async def read() -> list[list[int]]:
        return [numbers(batch) async for batch in stream]

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    stream.close()
    stream.close()
    stream.finish(EngineDeadError("too late"))
    assert await reader == []
    assert ended == ["r"]


async def test_a_failure_goes_before_what_was_not_read(stream: Stream, ended: list[str]) -> None:
    push(stream, 1)
    stream.finish(None)
    stream.fail(EngineDeadError("cut"))
    seen: list[list[int]] = []
    with pytest.raises(EngineDeadError, match="cut"):
        await read_into(seen, stream)
    assert seen == []
    assert ended == ["r"]
