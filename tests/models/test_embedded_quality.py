"""What quantized weights and int8 activations cost: the decoder as it computes against the same weights in float32.

Tiny models; the real one is benches/quality.py's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from embedded_driver import EmbeddedDriver
from tiny_models import make_reference, save
from torch import Tensor

from octavo.config import ModelConfig
from octavo.models.stored_weights import PLAIN, TOP, Place, StoredWeight
from octavo.worker.embedded_weights import kept_format


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
        assert kept_format(place, StoredWeight(stored, place.shape, bytes_of_none), config) == expected
    if stored in PLAIN:
        ragged = Place(0, "q", (64, 40))
        assert kept_format(ragged, StoredWeight(stored, ragged.shape, bytes_of_none), config) == kept[2]


def bytes_of_none() -> npt.NDArray[np.uint8]:
    raise AssertionError("formats are chosen from headers")
