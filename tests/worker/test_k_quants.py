"""Q4_K, Q5_K and Q6_K end to end: files whose every matrix is of one of them, through the embedded decoder.

What computing with int8 activations costs is bounded as in benches/quality.py, which measures it on a real model. The
files are made by benches/weight_files.py, which widens this model of 64 columns to whole blocks of 256.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.sources.gguf_models import make_model, write_model

BOUNDS = {"Q4_K": 0.05, "Q5_K": 0.05, "Q6_K": 0.01}
COARSE = {"Q4_K": 0.15, "Q5_K": 0.05, "Q6_K": 0.02}
"""KL of the weights: a model that was widened wrongly would be farther off."""


@pytest.fixture(scope="module")
def benches() -> Iterator[tuple[Any, Any]]:
    """benches/weight_files.py and benches/quality.py."""
    folder = str(Path(__file__).resolve().parents[2] / "benches")
    sys.path.insert(0, folder)
    yield importlib.import_module("weight_files"), importlib.import_module("quality")
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in float32, sharp enough for its logits to tell tokens apart."""
    model = make_model("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(24 if name.startswith("lm_head") else 6)
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf", "llama", model)


@pytest.mark.parametrize("kind", BOUNDS)
def test_computing_costs_little(benches: tuple[Any, Any], source: Path, tmp_path: Path, kind: str) -> None:
    weight_files, quality = benches
    path = tmp_path / f"{kind}.gguf"
    weight_files.write_gguf(source, kind, path)
    matrices = [tensor for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1]
    assert len(matrices) == 16
    assert {tensor.tensor_type.name for tensor in matrices} == {kind}
    assert all(tensor.shape[0] % 256 == 0 for tensor in matrices)
    texts = np.random.default_rng(2).integers(3, 96, size=(6, 40)).tolist()
    cost = coarse = 0.0
    with (
        quality.decoder(source, dtype="float32") as plain,
        quality.decoder(path, dtype="float32") as widened,
        quality.decoder(path) as stored,
    ):
        for ids in texts:
            expected, original = quality.logits_of(widened, ids), quality.logits_of(plain, ids)
            assert expected.std() > 1.5
            cost += quality.divergence(quality.logits_of(stored, ids), expected) / len(texts)
            coarse += quality.divergence(expected, original) / len(texts)
    assert 1e-7 < cost < BOUNDS[kind]
    assert 1e-5 < coarse < COARSE[kind]
