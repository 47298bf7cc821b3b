"""The gRPC server over the scripted engine, and a channel to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from fake_engine import FakeLLM

from octavo.config import ServerConfig
from octavo.server.context import ServerContext
from octavo.server.grpc.protocol import compiled
from octavo.server.grpc.server import GrpcServer


@pytest.fixture
async def server(llm: FakeLLM, config: ServerConfig) -> AsyncIterator[GrpcServer]:
    made = GrpcServer(ServerContext(llm, config), "127.0.0.1", 0)  # type: ignore[arg-type]
    await made._server.start()
    await made._tell_health()
    yield made
    await made._server.stop(0)


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as made:
        yield made


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> object:
    return compiled()[1].OctavoStub(channel)
