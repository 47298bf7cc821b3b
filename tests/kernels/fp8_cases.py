"""fp8 products of decode steps, and what lies between those of other steps, in Triton's interpreter; run by
test_fp8_kernels.py.

The interpreter reads e4m3 as it should but rounds wrongly to it, so quantized rows are kept in fp32 here, unrounded:
what is compared is everything but that rounding, which gpu_fp8.py checks on a device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_models import Sizes, make_context, raw_config
from fused_numerics_cases import _loop_bounds_are_numbers, make_stream  # noqa: F401 (a fixture)
from fused_stand_in import run
from fused_steps import relative_error
from joined_model_cases import make_context as make_step
from torch import Tensor

from octavo.attention.base import make_backend
from octavo.kernels.reference import gated as reference_gated
from octavo.kernels.reference import rms_norm as reference_norm
from octavo.kernels.reference.quantize_rows import FP8, LARGEST, dequantize_rows, quantize_rows
from octavo.kernels.reference.skinny_linear import add_linear, gated_linear, linear, rms_norm
from octavo.kernels.triton import moe_experts, quantized_joins, skinny_linear
from octavo.kernels.triton import quantize_rows as row_kernel
from octavo.kernels.triton.quantize_rows import quantize_launch
from octavo.kernels.triton.scale_product import scale_product
from octavo.kernels.triton.skinny_linear import (
    QuantizedRows,
    SkinnyLinear,
    SplitScratch,
    add_residual,
    quantized,
    scaled_store,
)
from octavo.kernels.triton.skinny_table import MAX_ROWS, Gemv
from octavo.layers.fused import fp8_joins
from octavo.layers.fused.decode import FusedDecode
from octavo.layers.moe import SparseMLP
from octavo.layers.quant import fp8
from octavo.layers.quant.fp8 import Fp8Rows
from octavo.models.config import NormalConfig, normalize_config
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model, with_wide_ends

CPU = torch.device("cpu")
EPS = 1e-5
SIZES = Sizes(hidden=128, inner=256, heads=4, kv_heads=2, head_dim=64, vocab=192, layers=3, qk_norm=False)


@pytest.fixture(autouse=True)
def _unrounded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(width: int, device: torch.device) -> QuantizedRows:
        return QuantizedRows(torch.zeros(MAX_ROWS * width, device=device), torch.zeros(MAX_ROWS, device=device))

    def allocate_rows(rows: int, width: int, device: torch.device, group: int) -> tuple[Tensor, Tensor]:
        assert group == 0
        return torch.full((rows, width), torch.nan), torch.full((rows,), torch.nan)

    monkeypatch.setattr(skinny_linear.QuantizedRows, "allocate", allocate)
    monkeypatch.setattr(quantized_joins, "allocate_rows", allocate_rows)


def unrounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in fp32 and their scales."""
    scale = quantize_rows(x)[1]
    return x / scale[:, None], scale


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 96), (3, 4100)])
def test_rows_are_scaled(rows: int, width: int) -> None:
    x = torch.randn(rows, width)
    x[rows // 2] = 0.0
    numbers, scale = torch.full((rows, width), torch.nan), torch.full((rows,), torch.nan)
    run(quantize_launch(x, numbers, scale))
    expected, expected_scale = quantize_rows(x)
    torch.testing.assert_close(scale, expected_scale)
    torch.testing.assert_close(numbers, x / expected_scale[:, None])
    assert numbers.abs().max() <= LARGEST * (1 + 1e-6)
    assert torch.equal(numbers.to(FP8).float(), expected.float())
    torch.testing.assert_close(row_kernel.quantize_rows(x.T.contiguous().T)[1], expected_scale)


def make_linear(op: str, n: int, k: int, config: Gemv, has_bias: bool) -> tuple[SkinnyLinear, Tensor]:
    """A product in e4m3, and its matrix in fp32."""
    matrix_rows = 2 * n if op == "gate_up" else n
    number, scale = quantize_rows(torch.randn(matrix_rows, k) * k**-0.5 * (0.1 + torch.rand(matrix_rows, 1)))
    bias = torch.randn(matrix_rows) if has_bias else None
    return SkinnyLinear(op, number, bias, {1: config}, scale), dequantize_rows(number, scale)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("op", "epilogue"), [("qkv", "store"), ("gate_up", "silu")])
def test_gemv_widens_weights(op: str, epilogue: str, has_bias: bool) -> None:
    n, k = 64, 512
    gain = 1 + 0.3 * torch.randn(k)
    product, matrix = make_linear(op, n, k, Gemv(4, 256, 4), has_bias)
    stream = make_stream(k, gain)
    assert quantized(product, stream.gained_mn[:1]) == []
    y = torch.full((1, n), torch.nan)
    run(scaled_store(product, stream, y, partials=1, epilogue=epilogue, eps=EPS))
    reference = gated_linear if op == "gate_up" else linear
    assert relative_error(y, reference(rms_norm(stream.residual_mn[:1], gain, EPS), matrix, product.bias)) < 1e-5


def test_gemv_adds_to_the_residual() -> None:
    n, k = 96, 256
    gain, x = (1 + 0.3 * torch.randn(n)), torch.randn(1, k)
    product, matrix = make_linear("o", n, k, Gemv(8, 128, 4), True)
    stream = make_stream(n, gain)
    expected = add_linear(stream.residual_mn[:1], x, matrix, product.bias)
    run(add_residual(product, x, stream, gain, SplitScratch.allocate([], CPU)))
    assert relative_error(stream.residual_mn[:1], expected) < 1e-5


def config_of(**changes: Any) -> NormalConfig:
    own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return normalize_config(raw_config(SIZES) | own | changes)


def make_models(config: NormalConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, Decoder]:
    """A model with fp8 layers, and the dense one with the same weights."""
    plain = build_model(config, dtype=torch.float32, device=CPU)
    assert isinstance(plain, Decoder)
    tensors = {}
    for name, slot in all_slots(plain).items():
        tensors[name] = (
            0.5 + torch.rand_like(slot) if slot.ndim == 1 else torch.randn_like(slot) * slot.shape[1] ** -0.5
        )
    models = []
    for keeps in (True, False):
        monkeypatch.setattr(fp8, "multiplies_fp8", lambda device, keeps=keeps: keeps)
        model = build_model(config, dtype=torch.float32, device=CPU, quantization="fp8")
        assert isinstance(model, Decoder)
        model.load_weights(tensors.items())
        model.set_attention_backend(make_backend("reference"))
        models.append(model)
    return models[0], models[1]


def all_slots(model: Decoder) -> dict[str, Tensor]:
    """Checkpoint names of everything."""
    found = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    found["lm_head.weight"] = model.head.weight
    for i, block in enumerate(model.layers()):
        found |= {f"model.layers.{i}.{name}": slot for name, slot in block.slots().items()}
    return found


@pytest.mark.parametrize("lengths", [[130], [5, 1, 64, 200]], ids=["one-row", "rows"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True},
        {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1", "down_proj"]}},
    ],
    ids=["llama", "biases", "some-layers-dense"],
)
def test_decode_step(changes: dict[str, Any], lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense model's modules against the fp8 model's launches."""
    torch.manual_seed(len(lengths))
    model, dense = make_models(config_of(**changes), monkeypatch)
    assert {layer.weight.dtype for layer in dense.modules() if hasattr(layer, "shards")} == {torch.float32}
    ctx = make_context(SIZES, lengths, layers=SIZES.layers, device="cpu")
    ctx.kv_cache = [cache.float() for cache in ctx.kv_cache]
    token_id_t = torch.randint(0, SIZES.vocab, (len(lengths),))
    caches = [cache.clone() for cache in ctx.kv_cache]
    decode = FusedDecode(model.weights())
    launches = decode.launches(token_id_t, ctx)
    num_fp8 = sum(layer.weight.dtype == FP8 for layer in model.modules() if hasattr(layer, "shards"))
    assert num_fp8 == (4 * SIZES.layers if "quantization_config" not in changes else 3 * (SIZES.layers - 1))
    assert sum(launch.kernel.__name__ == "quantize_rows_kernel" for launch in launches) == num_fp8 * (len(lengths) > 1)
    for launch in launches:
        run(launch)
    hidden = decode._buffers.hidden_tm[: len(lengths)].clone()
    expected = dense.forward(token_id_t, ctx.position_t, replace(ctx, kv_cache=caches))
    assert relative_error(hidden, expected) < 2e-5
    for ours, theirs in zip(ctx.kv_cache, caches, strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("lengths", [[130], [5, 1, 64]], ids=["one-row", "rows"])
def test_decode_step_of_a_mixture(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in e4m3 between blocks that stay wide: the dense model's modules against the launches."""
    torch.manual_seed(len(lengths))
    monkeypatch.setattr(moe_experts, "ROW_NUMBERS", torch.float32)
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config = with_wide_ends(config_of(**names, **mixture), (0, 1), (1, 1))
    model, dense = make_models(config, monkeypatch)
    kinds = [block.mlp.down.dtype for block in model.layers() if isinstance(block.mlp, SparseMLP)]
    assert kinds == [torch.float32, FP8, torch.float32]
    ctx = make_context(SIZES, lengths, layers=SIZES.layers, device="cpu")
    ctx.kv_cache = [cache.float() for cache in ctx.kv_cache]
    token_id_t = torch.randint(0, SIZES.vocab, (len(lengths),))
    caches = [cache.clone() for cache in ctx.kv_cache]
    decode = FusedDecode(model.weights())
    for launch in decode.launches(token_id_t, ctx):
        run(launch)
    hidden = decode._buffers.hidden_tm[: len(lengths)].clone()
    expected = dense.forward(token_id_t, ctx.position_t, replace(ctx, kv_cache=caches))
    assert relative_error(hidden, expected) < 2e-5


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 96), (2, 4100), (0, 64)])
def test_joins_quantize_what_they_make(rows: int, width: int) -> None:
    def same(actual: tuple[Tensor, Tensor], expected: Tensor) -> None:
        for found, wanted in zip(actual, unrounded(expected), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)

    x, residual, gain = torch.randn(rows, width), torch.randn(rows, width), 1 + 0.3 * torch.randn(width)
    same(quantized_joins.rms_norm(x, gain, EPS), reference_norm.rms_norm(x, gain, EPS))
    normed, total = reference_norm.add_rms_norm(x, residual, gain, EPS)
    found, in_place = quantized_joins.add_rms_norm(x, residual, gain, EPS)
    same(found, normed)
    assert in_place is residual
    assert torch.equal(residual, total)
    product = 3 * torch.randn(rows, 2 * width)
    same(quantized_joins.gated_silu(product), reference_gated.gated_silu(product))


@pytest.mark.parametrize("skipped", [[], ["model.layers.1", "down_proj"]], ids=["all", "some-layers-dense"])
@pytest.mark.parametrize("rows", [[(70, 70), (3, 9)], [(5, 5)]], ids=["many-tokens", "few-tokens"])
def test_modules(rows: list[tuple[int, int]], skipped: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt step of the dense model against the fp8 model's modules, which quantize between products."""
    config = config_of(quantization_config={"quant_method": "fp8", "modules_to_not_convert": skipped})
    model, dense = make_models(config, monkeypatch)
    calls = []

    def multiply(x: Fp8Rows, weight: Tensor, scale_o: Tensor, bias_o: Tensor | None) -> Tensor:
        calls.append(x.scale_t.shape[0])
        return linear(dequantize_rows(*x), dequantize_rows(weight, scale_o), bias_o)

    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(fp8, "rowwise", multiply)
    monkeypatch.setattr(fp8, "tensorwise", multiply)
    quantizations = []
    monkeypatch.setattr(row_kernel, "quantize_rows", lambda x: quantizations.append(x.shape) or unrounded(x))
    monkeypatch.setattr(fp8_joins, "multiplies_fp8", lambda device: True)
    model.use_joins()
    model.set_attention_backend(make_backend("triton"))
    found, expected = [], []
    for which, outputs in ((model, found), (dense, expected)):
        torch.manual_seed(1)
        ctx, token_id_t = make_step(which, rows, 16)
        outputs += [which.forward(token_id_t, ctx.position_t, ctx), *ctx.kv_cache]
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 2e-5
    num_fp8 = sum(layer.weight.dtype == FP8 for layer in model.modules() if hasattr(layer, "shards"))
    assert calls == [sum(count for count, _ in rows)] * num_fp8
    assert len(quantizations) == num_fp8 // (3 if skipped else 4), "only what attention gives is quantized by itself"


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 2100), (2, 4096), (0, 64)])
def test_scales_of_a_product(rows: int, width: int, has_bias: bool) -> None:
    out, scale_t, scale_o = torch.randn(rows, width), torch.rand(rows), torch.rand(width)
    bias = torch.randn(width) if has_bias else None
    expected = out * scale_t[:, None] * scale_o + (0.0 if bias is None else bias)
    found = scale_product(out, scale_t, scale_o, bias)
    assert found is out
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rows", [1, 40])
def test_a_tensorwise_product(rows: int) -> None:
    """Its own scales are 1, so that a CPU, which knows no other, can multiply."""
    x, (number, scale) = torch.randn(rows, 64), quantize_rows(torch.randn(96, 64))
    bias = torch.randn(96)
    quantized_x = Fp8Rows(*quantize_rows(x))
    found = fp8.tensorwise(quantized_x, number, scale, bias)
    assert found.dtype == torch.bfloat16
    expected = linear(dequantize_rows(*quantized_x), dequantize_rows(number, scale), bias)
    assert relative_error(found, expected) < 5e-3
