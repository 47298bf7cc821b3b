"""fp8 checkpoints with a scale for every square of 128 x 128 weights: linear layers keep them bit by bit, whatever the
sizes of their parts; a device without fp8 products gets the numbers that they stand for.

Products here are the reference's (kernels/reference/squares.py); the kernels are held against it in
tests/kernels/square_cases.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fp8_checkpoints
import pytest
import torch
from fp8_checkpoints import Fp8Checkpoint, keep_on_device, read, write
from paged_driver import PagedDriver
from tiny_models import CASES, QWEN3_MOE, make_reference, read_config, read_tensors, save
from torch import Tensor

from octavo.errors import ModelError
from octavo.kernels.reference.quantize_rows import FP8, dequantize_rows, quantize_weights
from octavo.kernels.reference.squares import (
    dequantize_squares,
    num_groups,
    quantize_groups,
    quantize_squares,
    square_product,
)
from octavo.layers.linear import DENSE, Linear
from octavo.layers.quant import fp8_squares
from octavo.layers.quant.fp8 import FP8_LINEAR
from octavo.layers.quant.fp8_squares import FP8_SQUARES, SQUARES
from octavo.layers.quant.fp8_tensors import as_kept
from octavo.layers.quant.stored import Quantization
from octavo.models import registry
from octavo.models.base import CausalLM
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model, footprint
from octavo.models.weights import linears_of, mixtures_of

IDS = [3 + (7 * i) % 90 for i in range(80)]
CPU = torch.device("cpu")
SKIPPED = ("lm_head", "model.layers.1.mlp.down_proj")
SIZES: dict[str, tuple[str, dict[str, Any], int]] = {
    "even": ("Llama", {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}, 128),
    "ragged": ("Qwen3", {"hidden_size": 160, "intermediate_size": 272, "head_dim": 48}, 32),
}
"""Name -> (class, sizes, rows of the qkv matrix that share scales); 4 heads, 2 KV heads."""


@pytest.fixture(params=SIZES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fp8Checkpoint:
    kind, sizes, _ = SIZES[request.param]
    return make(tmp_path, monkeypatch, kind, sizes, SKIPPED)


def make(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    sizes: dict[str, Any],
    ignored: tuple[str, ...] = ("lm_head",),
    form: str = "hf-block",
) -> Fp8Checkpoint:
    """A checkpoint in squares, of a tiny model of Transformers' class whose products keep their input's size."""
    monkeypatch.setitem(CASES, "squares", (kind, sizes))
    monkeypatch.setattr(fp8_checkpoints, "BLOCK", (128, 128))
    reference = make_reference("squares")
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return write(save(reference, folder / "plain"), folder / "fp8", form, ignored=ignored)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_on_device(monkeypatch)


def parts(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, what its numbers stand for) of every part of a linear layer."""
    assert isinstance(model, Decoder)
    for i, block in enumerate(model.layers()):
        for layer in linears_of(block):
            wide = layer.weight.float()
            if layer.method is FP8_SQUARES:
                assert layer.weight.dtype == FP8
                assert layer.weight_scale is not None
                wide = dequantize_squares(layer.weight, layer.weight_scale, layer.share)
            start = 0
            for name, size in layer.shards.items():
                yield f"model.layers.{i}.{name}", wide[start : start + size]
                start += size


def logits(model: CausalLM) -> Tensor:
    return PagedDriver(model, max_len=len(IDS)).step([(0, IDS)])


def meant(checkpoint: Fp8Checkpoint) -> CausalLM:
    """The fp32 model of the numbers that a checkpoint stands for."""
    model = build_model(read_config(checkpoint.folder), dtype=torch.float32, device=torch.device("cpu"))
    model.load_weights(checkpoint.tensors.items())
    return model


def test_weights_are_kept(checkpoint: Fp8Checkpoint, on_device: None, request: pytest.FixtureRequest) -> None:
    model = read(checkpoint.folder, "fp8")
    assert isinstance(model, Decoder)
    found = dict(parts(model))
    assert len(found) == 3 * 7
    for name, weight in found.items():
        assert torch.equal(weight, checkpoint.tensors[f"{name}.weight"]), name
    wide = [layer for layer in linears_of(model) if layer.method is DENSE]
    assert [list(layer.shards) for layer in wide] == [["mlp.down_proj"]]
    (share,) = (share for case, (_, _, share) in SIZES.items() if case in request.node.name)
    qkv = next(iter(model.layers())).attention.qkv
    assert qkv.share == share
    assert qkv.weight_scale.shape == (num_groups(qkv.out_features, share), num_groups(qkv.in_features))


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_a_device_without_fp8_gets_what_they_stand_for(checkpoint: Fp8Checkpoint, quantization: str) -> None:
    model = read(checkpoint.folder, quantization)
    assert isinstance(model, Decoder)
    assert all(layer.method is DENSE and layer.weight_scale is None for layer in linears_of(model))
    assert torch.equal(logits(model), logits(meant(checkpoint)))


def test_logits(checkpoint: Fp8Checkpoint, on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows are off by the rounding of activations only, less than with weights that are rounded to channels again;
    one row alone by nothing."""
    model, expected = read(checkpoint.folder, "fp8"), logits(meant(checkpoint))
    monkeypatch.setattr(registry, "find_method", lambda name, block: FP8_LINEAR)
    again = read(checkpoint.folder, "fp8")
    errors = [((logits(m) - expected).norm() / expected.norm()).item() for m in (model, again)]
    assert 0.02 < errors[0] < 0.12, "each of 12 products in a row rounds its input by 2.6%"
    assert errors[0] < 0.9 * errors[1], "weights rounded again"
    driver = PagedDriver(model, max_len=len(IDS))
    alone = torch.cat([driver.step([(0, [token])]) for token in IDS])
    assert (alone - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("form", ["hf-block", "ct-block"])
def test_dense_layers_beside_experts(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: None
) -> None:
    sizes = {**QWEN3_MOE, "hidden_size": 128, "moe_intermediate_size": 128, "mlp_only_layers": [0], "num_experts": 3}
    made = make(tmp_path, monkeypatch, "Qwen3Moe", sizes, form=form)
    model = read(made.folder, "fp8")
    found = dict(parts(model))
    assert len(found) == 7 + 2 * 4
    for name, weight in found.items():
        assert torch.equal(weight, made.tensors[f"{name}.weight"]), name
    assert all(layer.method is FP8_SQUARES for layer in linears_of(model))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Qwen3Moe", "DeepseekV3"])
def test_experts_of_odd_sizes_are_rounded_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: None
) -> None:
    """To scales of channels: 160 features are no whole squares. Weights are off by a rounding in e4m3 and not more,
    logits by little more than without it, and linear layers keep their squares."""
    case = {"Qwen3Moe": "qwen3-moe", "DeepseekV3": "deepseek-v3"}[kind]
    sizes = {**CASES[case][1], "hidden_size": 256, "moe_intermediate_size": 160}
    made = make(tmp_path, monkeypatch, kind, sizes)
    model, expected, again = read(made.folder, "fp8"), meant(made), meant(made)
    assert isinstance(model, Decoder)
    assert isinstance(expected, Decoder)
    assert isinstance(again, Decoder)
    for name, weight in parts(model):
        assert torch.equal(weight, made.tensors[f"{name}.weight"]), name
    count = 0
    for mixture, exact, rounded in zip(*(mixtures_of(each) for each in (model, expected, again)), strict=True):
        assert mixture.form == "channels"
        for part in ("gate_up", "down"):
            matrix, scale = getattr(exact, part), getattr(mixture, f"{part}_scale")
            found = getattr(mixture, part).float() * scale[..., None]
            usual = dequantize_rows(*quantize_weights(matrix.flatten(0, 1))).view(matrix.shape)
            assert torch.equal(found, usual), "as any weights"
            assert 0.01 * matrix.norm() < (found - matrix).norm() < 0.035 * matrix.norm()
            getattr(rounded, part).copy_(found)
            count += len(matrix)
    assert count >= 2 * 8
    exact_logits = logits(expected)
    assert 0 < (logits(again) - exact_logits).norm() < 0.06 * exact_logits.norm()


def test_latent_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: None) -> None:
    """DeepSeek-V3: latents and their queries are one matrix, whose second part ends within a square; the matrix that
    heads multiply with stays wide."""
    sizes: dict[str, Any] = {
        **CASES["deepseek-v3"][1],
        "q_lora_rank": 48,
        "hidden_size": 192,
        "first_k_dense_replace": 3,
    }
    made = make(tmp_path, monkeypatch, "DeepseekV3", sizes)
    expected, model = meant(made), read(made.folder, "fp8")
    assert isinstance(model, Decoder)
    assert {layer.method for layer in linears_of(model)} == {FP8_SQUARES}
    for name, weight in parts(model):
        assert torch.equal(weight, made.tensors[f"{name}.weight"]), name
    exact = logits(expected)
    assert (logits(model) - exact).norm() < 0.15 * exact.norm()


def test_dummy_weights(checkpoint: Fp8Checkpoint, on_device: None) -> None:
    for name, weight in parts(read(checkpoint.folder, "fp8", load_format="dummy")):
        assert 0.018 < weight.std() < 0.022, name


def test_bytes(checkpoint: Fp8Checkpoint) -> None:
    config = read_config(checkpoint.folder)
    plain, packed = (footprint(config, torch.bfloat16, quantization=kind).weight_bytes for kind in ("none", "fp8"))
    model = build_model(config, dtype=torch.bfloat16, device=torch.device("meta"), quantization="fp8")
    assert isinstance(model, Decoder)
    kept = [layer for layer in linears_of(model) if layer.weight_scale is not None]
    assert len(kept) == 3 * 4 - 1
    scales = sum(layer.weight_scale.numel() for layer in kept if layer.weight_scale is not None)
    assert plain - packed == sum(layer.weight.numel() for layer in kept) - 4 * scales


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mlp.up_proj.weight_scale_inv": torch.ones(3, 9)}, r"up_proj: torch.float8_e4m3fn with scales of shape \[3"),
        ({"mlp.up_proj.weight": torch.zeros(384, 256)}, "up_proj.weight is torch.float32"),
        ({"self_attn.o_proj.weight_scale_inv": None}, "without their weight_scale.*o_proj"),
    ],
)
def test_damaged_checkpoints(
    change: dict[str, Tensor | None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: None
) -> None:
    from safetensors.torch import load_file, save_file

    kind, sizes, _ = SIZES["even"]
    file = make(tmp_path, monkeypatch, kind, sizes).folder / "model.safetensors"
    tensors = load_file(file) | {f"model.layers.1.{name}": tensor for name, tensor in change.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(ModelError, match=words):
        read(file.parent, "fp8")


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_class_of_transformers(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: None) -> None:
    """Under the names of another time too."""
    made = make(tmp_path, monkeypatch, "OPT", {"word_embed_proj_dim": 64}, ("lm_head", "fc1", "fc2"))
    model: Any = build_model(
        read_config(made.folder), dtype=torch.float32, device=torch.device("cpu"), quantization="fp8"
    )
    model.load_weights((name.replace("model.", prefix, 1), tensor) for name, tensor in read_tensors(made.folder))
    kept = [layer for layer in linears_of(model) if layer.method is FP8_SQUARES]
    assert len(kept) == 3 * 4
    for layer in kept:
        assert layer.weight_scale is not None
        (name,) = layer.shards
        wide = dequantize_squares(layer.weight, layer.weight_scale, layer.share)
        assert torch.equal(wide, made.tensors[f"{name}.weight"])


def test_matrices_that_were_fused_from_dequantized_ones() -> None:
    """Their squares are found again."""
    weight = dequantize_squares(*quantize_squares(torch.randn(200, 160)))
    slots = {"a.weight": torch.empty(200, 160, dtype=FP8), f"a.{SQUARES}": torch.empty(2, 2)}
    stored = Quantization("fp8", (128, 128), ("",), ())
    found = dict(as_kept([("a.weight", weight)], slots, stored, rounds_squares=True))
    assert list(found) == list(slots)
    again = dequantize_squares(found["a.weight"], found[f"a.{SQUARES}"])
    assert (again - weight).norm() < 1e-6 * weight.norm()
    with pytest.raises(ModelError, match=r"a.weight is torch.float32"):
        list(as_kept([("a.weight", weight)], slots, stored))


def test_products_that_are_dealt_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: None) -> None:
    """Qwen3-Next: queries and gates, and all that a recurrent layer reads, come in one matrix, head by head; their
    squares are dealt out as they are."""
    sizes = {
        **CASES["qwen3-next"][1],
        "head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "mlp_only_layers": [0, 1, 2, 3],
    }
    made = make(tmp_path, monkeypatch, "Qwen3Next", sizes)
    model, expected = read(made.folder, "fp8"), meant(made)
    assert isinstance(model, Decoder)
    assert isinstance(expected, Decoder)
    kept = 0
    for layer, wide in zip(linears_of(model), linears_of(expected), strict=True):
        found = layer.weight
        if layer.method is FP8_SQUARES:
            assert layer.weight_scale is not None
            found, kept = dequantize_squares(layer.weight, layer.weight_scale, layer.share), kept + 1
        assert torch.equal(found, wide.weight), list(layer.shards)
    assert kept == 3 * 2 + 2 + 4 * 2


@pytest.mark.parametrize(
    ("sizes", "inputs", "is_taken"),
    [
        ({"a": 128, "b": 192}, 1024, True),
        ({"a": 144}, 512, True),
        ({"a": 128}, 640, False),
        ({"a": 256}, 128, False),
        ({"a": 64, "b": 128}, 512, False),
        ({"a": 136}, 512, False),
    ],
)
def test_cublas_gets_what_it_reads(
    sizes: dict[str, int], inputs: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch, on_device: None
) -> None:
    """cuBLAS steps from one square of outputs to the next by a multiple of four scales, and takes rows by fours."""
    layer = Linear(inputs, sizes, bias=True, dtype=torch.bfloat16, device=CPU, choose=lambda _: FP8_SQUARES)
    outputs, taken = sum(sizes.values()), []
    assert layer.weight_scale is not None
    assert layer.bias is not None
    number, _ = quantize_squares(torch.randn(outputs, inputs))
    layer.weight.data.copy_(number)
    layer.weight_scale.data.uniform_(0.5, 1.5)
    layer.bias.data.normal_()

    def multiply(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **_: Any) -> Tensor:
        taken.append(a.shape)
        assert a.shape[0] % 4 == 0
        assert scale_a.stride() == (1, a.shape[0])
        groups = inputs // 128
        read = torch.as_strided(scale_b, (-(-outputs // 128), groups), (-(-groups // 4) * 4, 1))
        return square_product((a, scale_a.t()), b.t(), read, None).to(torch.bfloat16)

    monkeypatch.setattr(fp8_squares, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    x = torch.randn(8, inputs, dtype=torch.bfloat16)
    wanted = square_product(quantize_groups(x), layer.weight, layer.weight_scale, layer.bias, layer.share)
    assert (layer(x) - wanted).norm() < 0.01 * wanted.norm()
    assert layer(x[:0]).shape == (0, outputs)
    assert bool(taken) == is_taken
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert (layer(x) - wanted).norm() < 0.01 * wanted.norm()
    assert len(taken) == is_taken
