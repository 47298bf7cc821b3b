"""One tiny model and one roomy server for all cases; some start a cramped server of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.cases.tiny_chat_model import write_model
from tests.server.serving import ServerProcess

FLAGS = (
    *("--dtype", "float32", "--block-size", "16", "--cpu-threads", "1", "--served-model-name", "tiny"),
    # The embedded decoder is done with a tiny model's answer before a second call can meet it.
    *("--runner", "torch"),
)
ROOMY = ("--num-gpu-blocks-override", "2048", "--max-num-seqs", "32", "--responses-store", "8")
CRAMPED = (
    *("--num-gpu-blocks-override", "13", "--max-num-seqs", "4"),
    *("--max-model-len", "192", "--max-num-batched-tokens", "24"),
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--model", str(model), *FLAGS, *ROOMY) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def url(server: ServerProcess) -> str:
    return server.url


@pytest.fixture(scope="session")
def cramped_url(model: Path) -> Iterator[str]:
    """12 usable blocks of 16 tokens, chunks of 24 tokens."""
    with ServerProcess("--model", str(model), *FLAGS, *CRAMPED) as server:
        yield server.wait_ready()


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as made:
        yield made


@pytest.fixture
async def cramped(cramped_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cramped_url, timeout=60) as made:
        yield made
