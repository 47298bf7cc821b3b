"""Tiny checkpoints in each fp8 format, written from a plain one, with the weights that they mean.

Formats: "hf-tensor" and "hf-block" are Hugging Face's `fp8`, the "ct-…" ones compressed-tensors with one scale a
tensor, a channel or a block, the "modelopt-…" ones those of NVIDIA's Model Optimizer.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import read_tensors
from torch import Tensor

from octavo.config import ModelConfig
from octavo.kernels.reference import quantize_rows as reference_rows
from octavo.kernels.reference.quantize_rows import dequantize_rows
from octavo.kernels.reference.squares import quantize_groups, square_product
from octavo.kernels.triton import quantize_rows, square_gemm
from octavo.kernels.triton.square_gemm import Rows, Squares
from octavo.layers.quant import fp8
from octavo.layers.quant.fp8 import Fp8Rows
from octavo.models.base import CausalLM
from octavo.models.loader import load_model
from octavo.models.registry import read_config
from octavo.models.sources import resolve_source

FORMATS = ("hf-tensor", "hf-block", "ct-tensor", "ct-channel", "ct-block", "modelopt-tensor", "modelopt-channel")
BLOCK = (20, 24)
"""Small, so that tiny layers have several; the last ones are partial."""


@dataclass(frozen=True)
class Fp8Checkpoint:
    """A folder, and its tensors with every fp8 weight as the fp32 numbers that it stands for."""

    folder: Path
    form: str
    tensors: dict[str, Tensor]


def write(
    source: Path,
    folder: Path,
    form: str,
    *,
    ignored: tuple[str, ...] = ("lm_head",),
    named: tuple[str, ...] | None = None,
) -> Fp8Checkpoint:
    """The checkpoint of `source` with all products but `ignored` layers quantized, which config.json calls `named`."""
    folder.mkdir()
    raw = json.loads((source / "config.json").read_text())
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in read_tensors(source):
        layer = name.removesuffix(".weight")
        if not re.search(r"proj\w*\.weight$", name) or layer in ignored:
            stored[name] = meant[name] = tensor
            continue
        granularity = form.partition("-")[2]
        scale = {"tensor": tensor_scale, "channel": channel_scale, "block": block_scale}[granularity](tensor)
        wide = expand(scale, tensor)
        number = (tensor / wide).to(torch.float8_e4m3fn)
        stored[name], meant[name] = number, number.float() * wide
        stored[f"{layer}.{'weight_scale_inv' if form == 'hf-block' else 'weight_scale'}"] = scale
        if form == "modelopt-tensor":
            stored[f"{layer}.weight_scale"] = scale.reshape(())
        if form in ("ct-tensor", "modelopt-tensor"):
            stored[f"{layer}.input_scale"] = torch.tensor([0.5])
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    raw["quantization_config"] = describe(form, ignored if named is None else named)
    (folder / "config.json").write_text(json.dumps(raw))
    generation = source / "generation_config.json"
    if generation.is_file():
        shutil.copy(generation, folder)
    return Fp8Checkpoint(folder, form, meant)


def read(folder: Path, quantization: str, dtype: torch.dtype = torch.float32, load_format: str = "auto") -> CausalLM:
    """The model of a folder, on the CPU."""
    found = resolve_source(ModelConfig(model=str(folder)), lambda stage, fraction: None)
    normal, cpu = read_config(found.raw_config, found.generation_config), torch.device("cpu")
    return load_model(found, normal, device=cpu, dtype=dtype, quantization=quantization, load_format=load_format)


def describe(form: str, ignored: tuple[str, ...]) -> dict[str, Any]:
    """The `quantization_config` of a format."""
    kind, granularity = form.split("-")
    if kind == "hf":
        block = list(BLOCK) if granularity == "block" else None
        scheme = "dynamic" if granularity == "block" else "static"
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": scheme,
            "weight_block_size": block,
            "modules_to_not_convert": list(ignored),
        }
    if kind == "modelopt":
        algorithm = {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN"}[granularity]
        return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": list(ignored)}
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": granularity, "symmetric": True}
    if granularity == "block":
        weights["block_structure"] = list(BLOCK)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


def tensor_scale(weight: Tensor) -> Tensor:
    return (weight.abs().amax() / 448).reshape(1)


def channel_scale(weight: Tensor) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / 448


def block_scale(weight: Tensor) -> Tensor:
    rows = torch.stack([part.abs().amax(0) for part in weight.split(BLOCK[0], 0)])
    return torch.stack([part.amax(1) for part in rows.split(BLOCK[1], 1)], 1) / 448


def expand(scale: Tensor, weight: Tensor) -> Tensor:
    """The scale of every weight."""
    if scale.numel() == 1 or scale.shape == (weight.shape[0], 1):
        return scale.expand_as(weight)
    wide = torch.empty_like(weight)
    for i in range(weight.shape[0]):
        for j in range(0, weight.shape[1], BLOCK[1]):
            wide[i, j : j + BLOCK[1]] = scale[i // BLOCK[0], j // BLOCK[1]]
    return wide


def keep_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers keep fp8 weights as on a device that multiplies them, and multiply as references do."""

    def multiply(x: Rows | Tensor, matrix: Squares, bias_n: Tensor | None, dtype: torch.dtype) -> Tensor:
        return square_product(x, matrix.number_nk, matrix.scale_sg, bias_n, matrix.share).to(dtype)

    def quantize(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
        return quantize_groups(x) if group else reference_rows.quantize_rows(x)

    def by_channel(x: Fp8Rows, weight_oi: Tensor, scale_o: Tensor, bias_o: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(dequantize_rows(*x), dequantize_rows(weight_oi, scale_o), bias_o)

    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(square_gemm, "square_product", multiply)
    monkeypatch.setattr(square_gemm, "takes_vector", lambda matrix: True)
    monkeypatch.setattr(square_gemm, "vector_product", multiply)
    monkeypatch.setattr(quantize_rows, "quantize_rows", quantize)
    monkeypatch.setattr(fp8, "rowwise", by_channel)
    monkeypatch.setattr(fp8, "tensorwise", by_channel)
