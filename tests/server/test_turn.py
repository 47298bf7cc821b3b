"""Turns of plain text: what the engine brings as events, and the events in one piece."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeDelta, FakeLLM, Item, Submitted

from octavo.config import ServerConfig
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.context import ServerContext
from octavo.server.events import ContentDelta, TurnEnd, TurnEvent, TurnMessage, TurnRequest
from octavo.server.turn import Turn, collect

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def context(llm: FakeLLM) -> ServerContext:
    return ServerContext(llm, ServerConfig())  # type: ignore[arg-type]


async def events_of(turn: Turn) -> list[TurnEvent]:
    return [event async for batch in turn.events() for event in batch]


async def test_text_becomes_content(context: ServerContext, llm: FakeLLM) -> None:
    turn = await Turn.start(context, TurnRequest(messages=HI, params=SamplingParams(max_tokens=2)), size_bytes=10)
    assert await events_of(turn) == [ContentDelta(0, "a"), ContentDelta(0, "b"), TurnEnd(0, "length")]
    assert turn.usage()["completion_tokens"] == 2
    turn.close()
    assert llm.streams[0].closed
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(llm.submitted[0].token_ids, False).endswith("hi<|im_end|>\n<|im_start|>assistant\n")


async def test_a_whole_turn(context: ServerContext, llm: FakeLLM) -> None:
    def script(request: Submitted) -> list[Item]:
        stop = FakeDelta(index=1, text="!", token_ids=[5, 6], finish_reason="stop", stop_reason="x")
        return [
            [FakeDelta(text="a", token_ids=[1]), FakeDelta(index=1, text="b", token_ids=[2])],
            [FakeDelta(text="c", token_ids=[3]), stop, FakeDelta(text="d", token_ids=[4], finish_reason="length")],
        ]

    llm.script = script
    request = TurnRequest(messages=HI, params=SamplingParams(n=2), return_token_ids=True)
    turn = await Turn.start(context, request, size_bytes=10)
    assert await collect(turn) == [
        TurnMessage(content="acd", finish_reason="length", token_ids=[1, 3, 4]),
        TurnMessage(content="b!", finish_reason="stop", stop_reason="x", token_ids=[2, 5, 6]),
    ]


async def test_log_probabilities_come_with_the_content(context: ServerContext, llm: FakeLLM) -> None:
    rows = [(1, [(97, -0.5)])]
    llm.script = lambda request: [
        [FakeDelta(text="", token_ids=[97], logprobs=rows, prompt_logprobs=[(2, [(3, -1.0)])])],
        [FakeDelta(text="a", token_ids=[98], logprobs=rows, finish_reason="stop")],
    ]
    turn = await Turn.start(context, TurnRequest(messages=HI, params=SamplingParams(logprobs=0)), size_bytes=10)
    assert await events_of(turn) == [ContentDelta(0, "", rows), ContentDelta(0, "a", rows), TurnEnd(0, "stop")]
    assert turn.prompt_rows == [(2, [(3, -1.0)])]


async def test_errors_come_before_anything_is_sent(context: ServerContext, llm: FakeLLM) -> None:
    with pytest.raises(RequestError, match="role"):
        await Turn.start(context, TurnRequest(messages=[{"role": "x"}], params=SamplingParams()), size_bytes=10)
    assert not llm.submitted


async def test_events_wait_for_the_engine(context: ServerContext, llm: FakeLLM) -> None:
    gate = asyncio.Event()
    llm.script = lambda request: [[FakeDelta(text="a")], gate, [FakeDelta(text="b", finish_reason="stop")]]
    turn = await Turn.start(context, TurnRequest(messages=HI, params=SamplingParams()), size_bytes=10)
    batches = turn.events()
    assert await anext(batches) == [ContentDelta(0, "a")]
    gate.set()
    assert await anext(batches) == [ContentDelta(0, "b"), TurnEnd(0, "stop")]
