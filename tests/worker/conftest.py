"""A tiny random Llama checkpoint, its Transformers model as the reference, and runners over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.config import make_engine_config
from octavo.worker.runner import TorchRunner

VOCAB_SIZE = 131


@pytest.fixture(scope="session")
def reference() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
    return model


@pytest.fixture(scope="session")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    reference.save_pretrained(path)
    return path


@pytest.fixture
def make_runner(folder: Path) -> Iterator[Callable[..., TorchRunner]]:
    """Runners over the checkpoint; keyword arguments are options."""
    made: list[TorchRunner] = []

    def make(**options: Any) -> TorchRunner:
        values = {
            "model": str(folder),
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "reference",
            "block_size": 4,
            "num_gpu_blocks_override": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "cpu_threads": 1,
        }
        made.append(TorchRunner(make_engine_config({**values, **options}), lambda stage, fraction: None))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.fixture(scope="session")
def greedy(reference: Any) -> Callable[[list[int], int], list[int]]:
    """The reference's greedy continuation of a prompt."""

    def run(prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return run
