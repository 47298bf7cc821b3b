"""A tiny byte-level tokenizer folder, and the app around a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeLLM
from scripted import Scripted
from starlette.applications import Starlette
from tiny_tokenizer import write_tokenizer

from octavo._core import Tokenizer
from octavo.config import ServerConfig
from octavo.server.app import make_app


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture
def llm(tokenizer: Tokenizer, model_folder: Path) -> FakeLLM:
    return FakeLLM(tokenizer, str(model_folder))


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig(max_body_bytes=1 << 20)


@pytest.fixture
def app(llm: FakeLLM, config: ServerConfig) -> Starlette:
    return make_app(llm, config)  # type: ignore[arg-type]


@pytest.fixture
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as made:
        yield made


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(monkeypatch)
