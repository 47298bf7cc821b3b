"""What quantized weights and int8 activations cost: the decoder as it computes against the same weights in float32.

Tiny models; the real one is benches/quality.py's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from embedded_driver import EmbeddedDriver
from tiny_models import make_reference, save
from torch import Tensor

from octavo.config import ModelConfig, make_engine_config
from octavo.errors import ConfigError
from octavo.models.stored_weights import PLAIN, TOP, Place
from octavo.worker.embedded_plan import find_model, make_plan
from octavo.worker.embedded_weights import kept_format
from octavo.worker.memory import make_plan as make_torch_plan


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


@pytest.mark.parametrize(
    ("stored", "dtype", "quantization", "kept"),
    [
        ("BF16", "bfloat16", "none", (None, None, None)),
        ("BF16", "float32", "none", ("F32", "F32", "F32")),
        ("BF16", "bfloat16", "int8", ("Q8_0", "Q8_0", "INT8")),
        ("F32", "float32", "int4", ("Q4_1", "Q8_0", "INT8")),
        ("Q4_K", "float16", "none", (None, None, None)),
        ("Q4_K", "float32", "none", ("F32", "F32", "F32")),
        ("Q5_0", "float16", "none", ("Q8_0", "Q8_0", "Q8_0")),
        ("Q5_0", "float32", "none", ("F32", "F32", "F32")),
    ],
)
def test_formats_that_weights_are_kept_in(
    stored: str, dtype: str, quantization: str, kept: tuple[str | None, ...]
) -> None:
    """Of a layer's matrix, the embedding, and a matrix whose rows are no whole blocks."""
    config = ModelConfig(dtype=dtype, quantization=quantization)
    for place, expected in zip((Place(0, "q", (64, 64)), Place(TOP, "embed", (64, 64))), kept[:2], strict=True):
        assert kept_format(place, stored, config) == expected
    if stored in PLAIN:
        ragged = Place(0, "q", (64, 40))
        assert kept_format(ragged, stored, config) == kept[2]


@pytest.mark.parametrize(("kv_cache_dtype", "most"), [("float16", 1e-6), ("bfloat16", 1e-4), ("int8", 1e-3)])
def test_narrow_caches(folder: Path, kv_cache_dtype: str, most: float) -> None:
    """A prompt, and one row a step from then on, read what was rounded."""
    ids = torch.randint(3, 101, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    plain, narrow = EmbeddedDriver(folder), EmbeddedDriver(folder, kv_cache_dtype=kv_cache_dtype)
    chunks = [ids[:40], *([token] for token in ids[40:])]
    costs = [divergence(narrow.step([(1, chunk)]), plain.step([(1, chunk)])) for chunk in chunks]
    assert 0 < sum(costs[1:]) / len(costs[1:]) < most
    assert 0 < costs[0] < most


def test_a_cache_of_int8_is_planned_with_its_scales(folder: Path) -> None:
    values = {"model": str(folder), "device": "cpu", "kv_cache_dtype": "int8"}
    config = make_engine_config(values)
    plan = make_plan(config, find_model(config, lambda stage, fraction: None)).memory
    model = plan.model
    assert plan.kv_token_bytes == 2 * model.num_layers * model.num_kv_heads * (model.head_dim + 4)
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 needs the embedded runner"):
        make_torch_plan(make_engine_config({**values, "attention_backend": "reference"}))
