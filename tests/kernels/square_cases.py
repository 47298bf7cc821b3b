"""Products with matrices whose scales are of squares, in Triton's interpreter against their references; run by
test_square_kernels.py.

The interpreter reads e4m3 as it should but rounds wrongly to it, so quantized rows are kept in fp32 here, unrounded:
what is compared is everything but that rounding, which gpu_squares.py checks on a device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from fp8_cases import SIZES, all_slots, config_of
from fused_models import make_context
from fused_numerics_cases import make_stream
from fused_stand_in import run
from fused_steps import relative_error
from joined_model_cases import make_context as make_step
from torch import Tensor

from octavo.attention.base import make_backend
from octavo.kernels.reference import gated as reference_gated
from octavo.kernels.reference import rms_norm as reference_norm
from octavo.kernels.reference.quantize_rows import FP8, LARGEST
from octavo.kernels.reference.skinny_linear import gated_linear, rms_norm
from octavo.kernels.reference.squares import (
    SIDE,
    dequantize_squares,
    expand_groups,
    num_groups,
    quantize_groups,
    quantize_squares,
)
from octavo.kernels.reference.squares import square_product as reference_product
from octavo.kernels.triton import quantize_rows, quantized_joins, skinny_linear, square_gemm
from octavo.kernels.triton.interpreter import mend
from octavo.kernels.triton.skinny_linear import QuantizedRows, SkinnyLinear, scaled_store
from octavo.kernels.triton.skinny_table import MAX_ROWS, Gemv
from octavo.kernels.triton.square_gemm import (
    TILES,
    Squares,
    choose_tile,
    rows_of_tiles,
    square_launch,
    takes_vector,
    vector_launch,
    vector_product,
)
from octavo.layers.fused import fp8_joins
from octavo.layers.fused.decode import FusedDecode
from octavo.layers.quant import fp8
from octavo.layers.quant.fp8_squares import WIDE_ROWS, Fp8Groups
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.models.weights import linears_of

mend()
CPU = torch.device("cpu")
EPS = 1e-5


def make_matrix(sizes: list[int], k: int, share: int) -> tuple[Squares, Tensor]:
    """Parts of so many rows, stacked as a layer does; and what the numbers stand for."""
    parts = [quantize_squares(torch.randn(n, k) * k**-0.5 * (0.1 + torch.rand(n, 1))) for n in sizes]
    wide = torch.cat([dequantize_squares(*part) for part in parts])
    scales = [
        scale.repeat_interleave(SIDE // share, 0)[: num_groups(n, share)]
        for n, (_, scale) in zip(sizes, parts, strict=True)
    ]
    numbers = torch.cat([number.view(torch.uint8) for number, _ in parts]).view(FP8)
    return Squares(numbers, torch.cat(scales), share), wide


SHAPES: dict[str, tuple[list[int], int, int]] = {
    "even": ([128, 256], 256, 128),
    "ragged": ([144], 208, 128),
    "parts": ([96, 48, 48], 176, 16),
    "small": ([16], 32, 128),
}
"""Name -> (output features of parts, input features, rows of W with equal scales)."""


@pytest.mark.parametrize("shape", SHAPES)
def test_stacked_squares(shape: str) -> None:
    matrix, wide = make_matrix(*SHAPES[shape])
    assert torch.equal(dequantize_squares(matrix.number_nk, matrix.scale_sg, matrix.share), wide)


def test_references_round_to_nearest() -> None:
    x = torch.randn(5, 300) * (0.01 + torch.rand(5, 1))
    x[2, 128:256] = 0
    number, scale = quantize_groups(x)
    assert scale.shape == (3, 5)
    wide_scale = expand_groups(scale, 300)
    assert torch.equal(number.float().abs().split(SIDE, 1)[0].amax(1), torch.full((5,), LARGEST))
    assert ((number.float() * wide_scale - x).abs() <= x.abs() / 16 + wide_scale / 512).all()
    weight = torch.randn(200, 300)
    number, scale = quantize_squares(weight)
    assert scale.shape == (2, 3)
    assert scale[1, 2] == weight[128:, 256:].abs().max() / LARGEST
    assert (dequantize_squares(number, scale) - weight).norm() < 0.03 * weight.norm()


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_with_scales_of_groups(shape: str, rows: int, tma: bool) -> None:
    """With bias and without; scales of groups lie apart."""
    matrix, wide = make_matrix(*SHAPES[shape])
    n, k = wide.shape
    x, bias = torch.randn(rows, k) * 3, torch.randn(n) if rows == 5 else None
    numbers, scale = unrounded_groups(x)
    apart = torch.full((scale.shape[0], rows + 3), torch.nan)[:, :rows]
    apart.copy_(scale)
    y = torch.full((rows, n), torch.nan)
    square_launch((numbers, apart), matrix, bias, y, tma=tma).run(pdl=False)
    assert relative_error(y, x @ wide.T + (0 if bias is None else bias)) < 1e-5
    expected = reference_product((numbers, scale), matrix.number_nk, matrix.scale_sg, bias, matrix.share)
    assert relative_error(y, expected) < 1e-5


def allocate_unrounded(rows: int, width: int, device: torch.device, group: int) -> tuple[Tensor, Tensor]:
    """Room for rows in fp32 and the scales of their groups."""
    return torch.full((rows, width), torch.nan), torch.full((num_groups(width, group), rows), torch.nan)


def unrounded_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in fp32 and the scales of their groups."""
    scale = quantize_groups(x)[1]
    return x / expand_groups(scale, x.shape[1]), scale


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_row(shape: str, has_bias: bool) -> None:
    matrix, wide = make_matrix(*SHAPES[shape])
    n, k = wide.shape
    x, bias = torch.randn(1, k), torch.randn(n) if has_bias else None
    y = torch.full((1, n), torch.nan)
    assert takes_vector(matrix) == (shape == "even"), "blocks of k fit multiples of 64"
    if takes_vector(matrix):
        vector_launch(x, matrix, bias, y).run(pdl=False)
        assert relative_error(y, x @ wide.T + (0 if bias is None else bias)) < 1e-5
        assert torch.equal(vector_product(x, matrix, bias, torch.float32), y)


@pytest.mark.parametrize(("k", "config"), [(512, Gemv(4, 256, 4)), (320, Gemv(8, 512, 4, is_masked=True))])
def test_gate_and_up(k: int, config: Gemv) -> None:
    """Both halves of one matrix, whose squares end with the first half in one case."""
    n, share = (128, 128) if k == 512 else (96, 32)
    matrix, wide = make_matrix([n, n], k, share)
    gain = 1 + 0.3 * torch.randn(k)
    product = SkinnyLinear("gate_up", matrix.number_nk, None, {1: config}, matrix.scale_sg, None, share)
    stream = make_stream(k, gain)
    y = torch.full((1, n), torch.nan)
    run(scaled_store(product, stream, y, partials=1, epilogue="silu", eps=EPS))
    assert relative_error(y, gated_linear(rms_norm(stream.residual_mn[:1], gain, EPS), wide, None)) < 1e-5


def test_every_tile_is_compiled_ahead() -> None:
    matrix, _ = make_matrix([16], 32, SIDE)
    ahead = [choose_tile(numbers.shape[0]) for numbers, _ in rows_of_tiles(matrix)]
    assert ahead == [tile for _, tile in TILES]
    assert {choose_tile(rows) for rows in range(1, 5000)} == set(ahead)


def test_room_for_rows_is_filled_up() -> None:
    """What cuBLAS gets: a multiple of four rows, of which the first ones are those asked for."""
    for rows in (1, 4, 6):
        numbers, scale = quantize_rows.allocate_rows(rows, 300, CPU, SIDE)
        assert (numbers.shape, scale.shape) == ((rows, 300), (3, rows))
        scale.copy_(torch.arange(3 * rows).view(3, rows))
        numbers.view(torch.uint8).fill_(7)
        filled, filled_scale = quantize_rows.filled_up(numbers, scale)
        room = -(-rows // 4) * 4
        assert (filled.shape, filled_scale.shape) == ((room, 300), (3, room))
        assert filled_scale.is_contiguous()
        assert torch.equal(filled_scale[:, :rows], scale)
        assert (filled[:rows].view(torch.uint8) == 7).all()


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 300), (3, 4100), (0, 64)])
def test_groups_are_quantized(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, after a norm, after an addition and a norm, after silu(gate) * up."""

    def same(actual: tuple[Tensor, Tensor], expected: Tensor) -> None:
        for found, wanted in zip(actual, unrounded_groups(expected), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)

    for module in (quantize_rows, quantized_joins):
        monkeypatch.setattr(module, "allocate_rows", allocate_unrounded)
    x, residual, gain = torch.randn(rows, width), torch.randn(rows, width), 1 + 0.3 * torch.randn(width)
    if rows:
        x[rows // 2, :64] = 0
    same(quantize_rows.quantize_rows(x, group=SIDE), x)
    same(quantized_joins.rms_norm(x, gain, EPS, group=SIDE), reference_norm.rms_norm(x, gain, EPS))
    normed, total = reference_norm.add_rms_norm(x, residual, gain, EPS)
    found, in_place = quantized_joins.add_rms_norm(x, residual, gain, EPS, group=SIDE)
    same(found, normed)
    assert in_place is residual
    assert torch.equal(residual, total)
    product = 3 * torch.randn(rows, 2 * width)
    same(quantized_joins.gated_silu(product, group=SIDE), reference_gated.gated_silu(product))


def make_models(monkeypatch: pytest.MonkeyPatch, skipped: list[str], **sizes: int) -> tuple[Decoder, Decoder]:
    """A model with scales of squares, and the dense one with the same weights."""
    stored = {"quant_method": "fp8", "weight_block_size": [SIDE, SIDE], "modules_to_not_convert": skipped}
    config = config_of(quantization_config=stored, num_hidden_layers=2, **sizes)
    plain = build_model(config, dtype=torch.float32, device=CPU)
    assert isinstance(plain, Decoder)
    tensors = {}
    for name, slot in all_slots(plain).items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj") or any(part in layer for part in skipped):
            is_gain = slot.ndim == 1
            tensors[name] = 0.5 + torch.rand_like(slot) if is_gain else torch.randn_like(slot) * slot.shape[1] ** -0.5
            continue
        tensors[name], tensors[f"{layer}.weight_scale_inv"] = quantize_squares(
            torch.randn_like(slot) * slot.shape[1] ** -0.5
        )
    models = []
    for keeps in (True, False):
        monkeypatch.setattr(fp8, "multiplies_fp8", lambda device, keeps=keeps: keeps)
        model = build_model(config, dtype=torch.float32, device=CPU, quantization="fp8")
        assert isinstance(model, Decoder)
        model.load_weights(tensors.items())
        model.set_attention_backend(make_backend("triton"))
        models.append(model)
    return models[0], models[1]


@pytest.mark.parametrize("lengths", [[130], [5, 1, 64]], ids=["one-row", "rows"])
@pytest.mark.parametrize(
    ("skipped", "sizes"),
    [([], {}), (["model.layers.1", "down_proj"], {}), ([], {"num_key_value_heads": 1})],
    ids=["all", "some-layers-dense", "shared"],
)
def test_decode_step(
    skipped: list[str], sizes: dict[str, int], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense model's modules against the launches of fused decode steps; in one case parts begin within squares."""

    def allocate(width: int, device: torch.device) -> QuantizedRows:
        return QuantizedRows(torch.zeros(MAX_ROWS * width), torch.zeros(MAX_ROWS * num_groups(width)))

    monkeypatch.setattr(skinny_linear.QuantizedRows, "allocate", allocate)
    model, dense = make_models(monkeypatch, skipped, **sizes)
    kv_heads = sizes.get("num_key_value_heads", SIZES.kv_heads)
    ctx = make_context(replace(SIZES, kv_heads=kv_heads), lengths, layers=2, device="cpu")
    ctx.kv_cache = [cache.float() for cache in ctx.kv_cache]
    token_id_t = torch.randint(0, SIZES.vocab, (len(lengths),))
    caches = [cache.clone() for cache in ctx.kv_cache]
    decode = FusedDecode(model.weights())
    launches = decode.launches(token_id_t, ctx)
    num_squares = sum(layer.method.form == "squares" for layer in linears_of(model))
    assert num_squares == (3 if skipped else 8)
    quantizing = [launch for launch in launches if launch.kernel.__name__ == "quantize_rows_kernel"]
    assert [launch.constants["GROUP"] for launch in quantizing] == [SIDE] * num_squares * (len(lengths) > 1)
    shares = {launch.constants["SHARE"] for launch in launches if launch.constants.get("SHARE")}
    assert shares == ({64, 128} if sizes else {128})
    for launch in launches:
        run(launch)
    hidden = decode._buffers.hidden_tm[: len(lengths)].clone()
    expected = dense.forward(token_id_t, ctx.position_t, replace(ctx, kv_cache=caches))
    assert relative_error(hidden, expected) < 2e-5


@pytest.mark.parametrize("skipped", [[], ["model.layers.1", "down_proj"]], ids=["all", "some-layers-dense"])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        ([(70, 70), (3, 9)], {}),
        ([(1, 30), (5, 5)], {}),
        ([(1, 20)], {}),
        ([(72, 72)], {"hidden_size": 144, "intermediate_size": 208, "head_dim": 48}),
    ],
    ids=["many-tokens", "few-tokens", "one-token", "ragged"],
)
def test_modules(
    rows: list[tuple[int, int]], sizes: dict[str, int], skipped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the dense model against the modules with squares, which quantize between products if there are many
    rows."""
    model, dense = make_models(monkeypatch, skipped, **sizes)
    monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(fp8_joins, "multiplies_fp8", lambda device: True)
    for module in (quantize_rows, quantized_joins):
        monkeypatch.setattr(module, "allocate_rows", allocate_unrounded)
    alone, products = [], []
    monkeypatch.setattr(quantize_rows, "quantize_rows", lambda x, group: alone.append(x.shape) or unrounded_groups(x))
    for name in ("square_product", "vector_product"):
        run = partial(lambda run, x, *args: products.append(type(x)) or run(x, *args), getattr(square_gemm, name))
        monkeypatch.setattr(square_gemm, name, run)
    model.use_joins()
    found, expected = [], []
    for which, outputs in ((model, found), (dense, expected)):
        torch.manual_seed(1)
        ctx, token_id_t = make_step(which, rows, 16)
        outputs += [which.forward(token_id_t, ctx.position_t, ctx), *ctx.kv_cache]
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 2e-5
    num_fp8 = sum(layer.method.form == "squares" for layer in linears_of(model))
    is_many = sum(count for count, _ in rows) > WIDE_ROWS
    assert products == [Fp8Groups if is_many else Tensor] * num_fp8
    assert len(alone) == is_many * num_fp8 // (3 if skipped else 4), "only what attention gives is quantized by itself"
