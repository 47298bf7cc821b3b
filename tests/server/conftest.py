"""A tiny byte-level tokenizer folder, and the app around a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeLLM
from scripted import Scripted
from starlette.applications import Starlette
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Builder

from octavo._core import Tokenizer
from octavo.config import ServerConfig
from octavo.server.app import make_app

TEMPLATE = (
    "{% if tools %}{{ 'tools: ' ~ tools | map(attribute='function.name') | join(',') ~ '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 bytes as ids 0..255 in the order of the byte-level alphabet, then three special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    builder = Builder(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    builder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    builder.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    builder.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    builder.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
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
