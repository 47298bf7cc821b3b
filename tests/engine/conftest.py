"""Engines for these tests: the fake runner (no model), and a tiny random Llama with a byte-level tokenizer."""

from __future__ import annotations

import asyncio
import json
import os
import select
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig, make_engine_config

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)


def fake_config(**options: Any) -> EngineConfig:
    """An engine whose steps take no time and need no model."""
    defaults = {"model": "fake", "runner": "fake", "max_model_len": 256, "max_num_seqs": 8, "block_size": 16}
    return make_engine_config(defaults | options)


def byte_alphabet() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def tokenizer_json() -> dict[str, Any]:
    """One token a byte, then the merged word "stop" (ids 256 to 258), then the special token <eos> (259)."""
    vocab = {letter: i for i, letter in enumerate(byte_alphabet())}
    merges = [["s", "t"], ["o", "p"], ["st", "op"]]
    vocab |= {"st": 256, "op": 257, "stop": 258}
    special = {"id": 259, "content": "<eos>", "single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [special | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights, a tokenizer and a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=259,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


async def ended(pid: int) -> None:
    """Wait for the end of any process."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = await asyncio.to_thread(select.select, [handle], [], [], 30)
    finally:
        os.close(handle)
    assert ready, f"process {pid} is still there"
