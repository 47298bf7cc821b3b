"""MXFP4 against Transformers' own conversion, and gpt-oss checkpoints that hold it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from paged_driver import PagedDriver
from tiny_models import load, make_reference, read_config, read_tensors, save
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from octavo.errors import ModelError
from octavo.models.gpt_oss import _sorted
from octavo.models.mxfp4 import dequantize
from octavo.models.registry import build_model


def random_matrix(*rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(blocks, scales) of a matrix."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(117, 125, (*rows, columns // 32), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_values(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.models.mxfp4.PIECE", piece)
    blocks, scales = random_matrix(3, 10, columns=96)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2)
    assert torch.equal(dequantize(blocks, scales), expected)


def quantized(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint with random MXFP4 in the place of the experts' matrices."""
    for name, tensor in read_tensors(folder):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, inputs, outputs = tensor.shape
            blocks, scales = random_matrix(count, outputs, columns=inputs, seed=len(name) + int(name.split(".")[2]))
            yield f"{name}_scales", scales
            yield f"{name}_blocks", blocks
        else:
            yield name, tensor


def test_a_checkpoint_equals_its_plain_numbers(tmp_path: Path) -> None:
    folder = save(make_reference("gpt-oss"), tmp_path)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    model = build_model(
        read_config(folder, quantization_config=quantization), dtype=torch.float32, device=torch.device("cpu")
    )
    tensors = dict(quantized(folder))
    model.load_weights(tensors.items())
    donor, plain = load(folder), {}
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            plain[stem] = dequantize(tensor, tensors[f"{stem}_scales"]).transpose(1, 2)
        elif not name.endswith("_scales"):
            plain[name] = tensor
    donor.load_weights(plain.items())
    ids = list(range(3, 40))
    assert torch.equal(PagedDriver(model).step([(0, ids)]), PagedDriver(donor).step([(0, ids)]))


def test_half_a_matrix_is_named(tmp_path: Path) -> None:
    folder = save(make_reference("gpt-oss"), tmp_path)
    model = load(folder)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.down_proj_blocks"):
        model.load_weights((n, t) for n, t in quantized(folder) if n != "model.layers.1.mlp.experts.down_proj_scales")


def test_gates_come_first() -> None:
    assert _sorted(torch.arange(6)[None]).tolist() == [[0, 2, 4, 1, 3, 5]]
