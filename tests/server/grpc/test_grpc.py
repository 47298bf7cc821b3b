"""Every method of the gRPC API as a client calls it: answers, statuses, keys, ends from either side."""

from __future__ import annotations

import asyncio
import gc
import json
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest
from fake_engine import FakeDelta, FakeLLM
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from octavo.config import ServerConfig
from octavo.errors import EngineDeadError, OverloadError
from octavo.protocol import PoolingFacts
from octavo.server.grpc.protocol import SERVICE, compiled
from octavo.server.grpc.server import GrpcServer

MESSAGES, _ = compiled()


def request(text: str = "hi", **params: Any) -> Any:
    return MESSAGES.GenerateRequest(text=text, sampling_params=MESSAGES.SamplingParams(**params))


async def collect(stub: Any, asked: Any, **options: Any) -> list[Any]:
    return [response async for response in stub.Generate(asked, **options)]


async def test_generate_streams_deltas_then_usage(stub: Any, llm: FakeLLM) -> None:
    responses = await collect(stub, request(max_tokens=3, n=2, temperature=0.5, seed=7, stop=["x"]))
    deltas = [delta for response in responses for delta in response.deltas]
    assert "".join(delta.text for delta in deltas if delta.index == 1) == "abc"
    assert [delta.finish_reason for delta in deltas] == ["", "", "", "", "length", "length"]
    usage = responses[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 6, 16)
    assert len({response.request_id for response in responses}) == 1
    params = llm.submitted[0].params
    assert (params.n, params.temperature, params.seed, list(params.stop)) == (2, 0.5, 7, ["x"])
    assert params.top_p == 1.0


async def test_prompts_as_ids_and_as_messages(stub: Any, llm: FakeLLM) -> None:
    ids = MESSAGES.GenerateRequest(token_ids=MESSAGES.TokenIds(ids=[5, 6, 7]))
    await collect(stub, ids)
    messages = json.dumps([{"role": "user", "content": "hi"}])
    await collect(stub, MESSAGES.GenerateRequest(messages_json=messages))
    assert llm.submitted[0].token_ids == [5, 6, 7]
    told = await stub.Tokenize(MESSAGES.TokenizeRequest(messages_json=messages))
    assert llm.submitted[1].token_ids == list(told.token_ids)


async def test_logprobs_and_stop_reasons(stub: Any, llm: FakeLLM) -> None:
    llm.script = lambda _: [
        [
            FakeDelta(
                text="a",
                token_ids=[97],
                logprobs=[(2, [(97, -1.5), (98, float("-inf"))])],
                finish_reason="stop",
                stop_reason=3,
            )
        ]
    ]
    first = (await collect(stub, request(logprobs=1)))[0].deltas[0]
    assert [(token.token_id, token.logprob) for token in first.logprobs[0].tokens] == [(97, -1.5), (98, -9999.0)]
    assert first.stop_reason == "3"


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        (MESSAGES.GenerateRequest(), "INVALID_ARGUMENT", "text, token_ids and messages_json"),
        (request(temperature=-1.0), "INVALID_ARGUMENT", "temperature"),
        (request(n=1000), "INVALID_ARGUMENT", "n must be"),
        (MESSAGES.GenerateRequest(messages_json="{"), "INVALID_ARGUMENT", "messages_json is not JSON"),
        (
            MESSAGES.GenerateRequest(messages_json="[" * 100_000),
            "INVALID_ARGUMENT",
            "messages_json is nested too deeply",
        ),
        (
            MESSAGES.GenerateRequest(messages_json='[{"role": "user", "content": "\\ud800"}]'),
            "INVALID_ARGUMENT",
            "messages_json has half of a surrogate pair",
        ),
        (MESSAGES.GenerateRequest(text="hi", request_id="no id"), "INVALID_ARGUMENT", "request_id must be"),
        (MESSAGES.GenerateRequest(messages_json='{"a": 1}'), "INVALID_ARGUMENT", "messages"),
        (
            MESSAGES.GenerateRequest(token_ids=MESSAGES.TokenIds(ids=[10**6])),
            "INVALID_ARGUMENT",
            "outside the vocabulary",
        ),
        (MESSAGES.GenerateRequest(text="hi", model="other"), "NOT_FOUND", "'other' does not exist"),
        (request(structured_outputs_json="nonsense"), "INVALID_ARGUMENT", "structured_outputs_json is not JSON"),
        (request("x" * 4000), "INVALID_ARGUMENT", "more than the context"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_mistakes_are_told(stub: Any, asked: Any, status: str, message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, asked)
    assert caught.value.code().name == status
    assert message in caught.value.details()
    assert await collect(stub, request())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadError("full", 7.0), "RESOURCE_EXHAUSTED"),
        (EngineDeadError("gone"), "UNAVAILABLE"),
        (KeyError("x"), "INTERNAL"),
    ],
)
async def test_troubles_of_the_engine(stub: Any, llm: FakeLLM, error: Exception, status: str) -> None:
    llm.script = lambda _: [[FakeDelta(text="a", token_ids=[97])], error]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, request())
    assert caught.value.code().name == status
    if isinstance(error, OverloadError):
        assert ("retry-after", "7") in [tuple(pair) for pair in caught.value.trailing_metadata()]


async def test_a_client_that_goes_away_ends_its_sequences(stub: Any, llm: FakeLLM) -> None:
    never = asyncio.Event()
    llm.script = lambda _: [[FakeDelta(text="a", token_ids=[97])], never]
    call = stub.Generate(request())
    await call.read()
    call.cancel()
    while not llm.streams[0].closed:
        await asyncio.sleep(0)


async def test_abort_by_id(stub: Any, llm: FakeLLM) -> None:
    llm.script = lambda _: [[FakeDelta(text="a", token_ids=[97])], asyncio.Event()]
    asked = request()
    asked.request_id = "mine"
    call = stub.Generate(asked)
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as twice:
        await collect(stub, asked)
    assert "in use" in twice.value.details()
    assert (await stub.Abort(MESSAGES.AbortRequest(request_id="mine"))).found
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    assert ended.value.code() == grpc.StatusCode.CANCELLED
    assert llm.streams[0].closed
    assert not (await stub.Abort(MESSAGES.AbortRequest(request_id="mine"))).found


async def test_a_client_that_reads_nothing_leaves(stub: Any, llm: FakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    llm.script = lambda _: [[FakeDelta(text="a" * 10**6, token_ids=[97])] for _ in range(9)]
    call = stub.Generate(request())
    await call.read()
    for _ in range(99):  # the next message is on its way
        await asyncio.sleep(0)
    call.cancel()
    async with asyncio.timeout(30):
        while not llm.streams[0].closed:
            await asyncio.sleep(0)
        await stub.ModelInfo(MESSAGES.ModelInfoRequest())
    gc.collect()
    await asyncio.sleep(0)
    assert caplog.text == ""


async def test_model_info_and_tokens(stub: Any) -> None:
    info = await stub.ModelInfo(MESSAGES.ModelInfoRequest())
    assert (list(info.names), info.max_model_len, info.has_chat_template) == (["tiny"], 128, True)
    ids = (await stub.Tokenize(MESSAGES.TokenizeRequest(text="abc"))).token_ids
    assert (await stub.Detokenize(MESSAGES.DetokenizeRequest(token_ids=ids))).text == "abc"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Detokenize(MESSAGES.DetokenizeRequest(token_ids=[10**6]))
    assert "not in the vocabulary" in caught.value.details()


@dataclass
class Pooled:
    """Like what `AsyncLLM.pool` gives."""

    rows: np.ndarray
    queue_s: float = 0.0


def embeds(llm: FakeLLM) -> list[list[int]]:
    """Make the engine one that embeds; the inputs that it will get."""
    got: list[list[int]] = []

    async def pool(inputs: list[Any], *, deadline_s: float) -> Pooled:
        got.extend(one.token_ids for one in inputs)
        return Pooled(np.array([[3.0, 4.0, 12.0]] * len(inputs), np.float32))

    assert llm.facts is not None
    llm.facts = replace(llm.facts, task="embed", pooling=PoolingFacts(num_outputs=3))
    llm.pool = pool  # type: ignore[attr-defined]
    return got


async def test_embed(stub: Any, llm: FakeLLM) -> None:
    got = embeds(llm)
    inputs = [MESSAGES.EmbedInput(text="abc"), MESSAGES.EmbedInput(token_ids=MESSAGES.TokenIds(ids=[5, 6]))]
    answer = await stub.Embed(MESSAGES.EmbedRequest(inputs=inputs, dimensions=2))
    assert [list(each.values) for each in answer.embeddings] == [pytest.approx([0.6, 0.8])] * 2
    assert got[1] == [5, 6]
    assert answer.usage.prompt_tokens == sum(map(len, got))
    for asked, message in (
        (MESSAGES.EmbedRequest(), "input"),
        (MESSAGES.EmbedRequest(inputs=inputs, dimensions=4), "dimensions"),
        (MESSAGES.EmbedRequest(inputs=[MESSAGES.EmbedInput(text="x" * 4000)]), "tokens"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(asked)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert message in caught.value.details()


async def test_a_model_does_one_thing(stub: Any, llm: FakeLLM) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="needs a model"):
        await stub.Embed(MESSAGES.EmbedRequest(inputs=[MESSAGES.EmbedInput(text="abc")]))
    embeds(llm)
    with pytest.raises(grpc.aio.AioRpcError, match="needs a model"):
        await collect(stub, request())


async def test_health_and_reflection(channel: grpc.aio.Channel, server: GrpcServer, llm: FakeLLM) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    serving = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert serving.status == health_pb2.HealthCheckResponse.SERVING
    llm.state = "restarting"
    await server._tell_health()
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING
    names = await asyncio.to_thread(_services, f"127.0.0.1:{server.port}")
    assert SERVICE in names


def _services(address: str) -> list[str]:
    with grpc.insecure_channel(address) as made:
        return list(ProtoReflectionDescriptorDatabase(made).get_services())


@pytest.mark.parametrize("config", [ServerConfig(api_key=["secret"], max_body_bytes=1 << 20)], ids=["keys"])
async def test_a_key_is_needed_but_for_health(stub: Any, channel: grpc.aio.Channel, server: GrpcServer) -> None:
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub, request(), metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ModelInfo(MESSAGES.ModelInfoRequest(), metadata=metadata)
    with pytest.raises(grpc.RpcError, match="API key"):
        await asyncio.to_thread(_services, f"127.0.0.1:{server.port}")
    assert await collect(stub, request(), metadata=(("authorization", "Bearer secret"),))
    assert await collect(stub, request(), metadata=(("x-api-key", "secret"),))
    assert await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


async def test_not_ready(stub: Any, llm: FakeLLM) -> None:
    llm.state = "restarting"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, request())
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
