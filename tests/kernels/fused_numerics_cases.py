"""The fused decode kernels against their references in Triton's interpreter; run by test_fused_kernels.py.

All in fp32, so that bounds are tight; bf16 is for gpu_fused.py (the interpreter has no bf16 `dot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton.runtime.interpreter as interpreter
from fused_steps import make_attention, relative_error
from torch import Tensor

from octavo.kernels.reference.skinny_linear import add_linear, gated_linear, linear, rms_norm
from octavo.kernels.triton import decode_attention_launches as attention
from octavo.kernels.triton import shared_attention
from octavo.kernels.triton.decode_attention_launches import TILE, AttentionScratch, HeadShape, attend
from octavo.kernels.triton.embed_norm import embed, final_norm
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.shared_attention import SharedConfig
from octavo.kernels.triton.skinny_linear import (
    ResidualStream,
    SkinnyLinear,
    SplitScratch,
    add_residual,
    scaled_store,
    store,
)
from octavo.kernels.triton.skinny_table import Gemv

CPU = torch.device("cpu")
EPS = 1e-5


@pytest.fixture(autouse=True)
def _loop_bounds_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter makes loop bounds arrays of one element, which NumPy 2.4 no longer takes for numbers."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def run(launch: Launch) -> None:
    launch.run(pdl=False)


def make_linear(op: str, n: int, k: int, config: Gemv, has_bias: bool) -> SkinnyLinear:
    rows = 2 * n if op == "gate_up" else n
    bias = torch.randn(rows) if has_bias else None
    weight = torch.randn(rows, k) * k**-0.5
    return SkinnyLinear(op, weight, bias, {1: config})


def make_stream(k: int, gain: Tensor) -> ResidualStream:
    """One row's stream, as an embedding leaves it."""
    stream = ResidualStream.allocate(k, torch.float32, CPU)
    table = torch.randn(5, k)
    run(embed(torch.tensor([3]), table, gain, stream))
    assert torch.equal(stream.residual_mn[0], table[3])
    return stream


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("op", "epilogue"), [("qkv", "store"), ("gate_up", "silu")])
def test_gemv_reads_a_normed_row(op: str, epilogue: str, has_bias: bool) -> None:
    n, k = 64, 512
    gain = 1 + 0.3 * torch.randn(k)
    product = make_linear(op, n, k, Gemv(4, 256, 4), has_bias)
    stream = make_stream(k, gain)
    y = torch.full((1, n), torch.nan)
    run(scaled_store(product, stream, y, partials=1, epilogue=epilogue, eps=EPS))
    normed = rms_norm(stream.residual_mn[:1], gain, EPS)
    reference = gated_linear if op == "gate_up" else linear
    assert relative_error(y, reference(normed, product.weight, product.bias)) < 1e-5


@pytest.mark.parametrize("has_bias", [False, True])
def test_gemv_adds_to_the_residual_and_prepares_the_next_norm(has_bias: bool) -> None:
    n, k, block_n = 96, 256, 8
    gain, x = (1 + 0.3 * torch.randn(n)), torch.randn(1, k)
    product = make_linear("o", n, k, Gemv(block_n, 128, 4), has_bias)
    stream = make_stream(n, gain)
    expected = add_linear(stream.residual_mn[:1], x, product.weight, product.bias)
    run(add_residual(product, x, stream, gain, SplitScratch.allocate([], CPU)))
    partials = product.num_tiles(1)
    assert partials == n // block_n
    assert relative_error(stream.residual_mn[:1], expected) < 1e-5
    residual = stream.residual_mn[:1].float()
    assert relative_error(stream.squares_f[:partials].sum(), residual.square().sum()) < 1e-5
    assert relative_error(stream.gained_mn[:1], residual * gain.float()) < 1e-5
    following = make_linear("qkv", 32, n, Gemv(8, 32, 4), False)
    y = torch.full((1, 32), torch.nan)
    run(scaled_store(following, stream, y, partials=partials, epilogue="store", eps=EPS))
    assert relative_error(y, linear(rms_norm(residual, gain, EPS), following.weight, None)) < 1e-5


def test_gemv_stores_fp32_logits() -> None:
    product = make_linear("head", 40, 128, Gemv(8, 128, 4), False)
    x, y = torch.randn(1, 128), torch.full((1, 40), torch.nan)
    run(store(product, x, y, make_stream(128, torch.ones(128))))
    assert relative_error(y, linear(x, product.weight, None)) < 1e-5


@pytest.mark.parametrize("width", [64, 96])
def test_embedding_and_final_norm(width: int) -> None:
    table, gain = torch.randn(9, width), (1 + 0.3 * torch.randn(width))
    token_id_t = torch.tensor([8, 0, 3, 3])
    stream = ResidualStream.allocate(width, torch.float32, CPU)
    run(embed(token_id_t, table, gain, stream))
    rows = table[token_id_t].float()
    assert torch.equal(stream.residual_mn[:4], table[token_id_t])
    assert relative_error(stream.gained_mn[:4], rows * gain.float()) < 1e-5
    assert relative_error(stream.squares_f[:4], rows.square().sum(-1)) < 1e-5
    out = torch.full((4, width), torch.nan, dtype=torch.float32)
    run(final_norm(stream, gain, EPS, out))
    assert relative_error(out, rms_norm(rows, gain, EPS)) < 1e-5


HEADS = {
    "gqa": HeadShape(8, 2, 64),
    "mha": HeadShape(2, 2, 64),
    "group-of-7": HeadShape(7, 1, 64),
    "dim-128": HeadShape(4, 2, 128),
}
ROWS = {"short": [1, 2, 64, 65, 63], "long": [200, 1, 321, 128], "one": [700], "many": [66] * 9}


@pytest.mark.parametrize(("heads", "rows"), [("gqa", rows) for rows in ROWS] + [(heads, "short") for heads in HEADS])
def test_attention(heads: str, rows: str) -> None:
    check_attention(ROWS[rows], HEADS[heads])


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("rows", ["short", "long"])
def test_attention_in_more_and_fewer_shares_than_tiles(splits: int, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "choose_splits", lambda *_: splits)
    check_attention(ROWS[rows], HEADS["gqa"])


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("num_shares", [2, 10, 1000])
def test_attention_in_shares_for_a_full_device(num_shares: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a share is depends on all rows' lengths."""
    monkeypatch.setattr(attention, "NUM_PROGRAMS", 1)
    monkeypatch.setattr(attention, "NUM_SHARES", num_shares)
    monkeypatch.setattr(attention, "choose_splits", lambda *_: 4)
    check_attention(ROWS["long"], HEADS["gqa"], window=window)


@pytest.mark.parametrize("window", [1, 5, 64, 100, 1000])
def test_attention_in_a_window(window: int) -> None:
    check_attention([1, 64, 65, 300, 130], HEADS["gqa"], window=window)


@pytest.mark.parametrize("rows", ["short", "one"])
def test_attention_norms_heads(rows: str) -> None:
    check_attention(ROWS[rows], HEADS["gqa"], qk_norm=True)


@pytest.mark.parametrize(
    ("heads", "splits", "num_shared"),
    [*((heads, 1, 3) for heads in HEADS), ("gqa", 4, 3), ("gqa", 1, 0), ("gqa", 1, 9), ("mha", 4, 1)],
)
def test_attention_to_shared_blocks(num_shared: int, splits: int, heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most rows share blocks, some have other ones, one is too short to have as many."""
    monkeypatch.setattr(attention, "choose_splits", lambda *_: splits)
    first = num_shared * TILE
    lengths = [first + 1, 130, first + 64, first + 200, 7, first + 65, 700]
    check_attention(lengths, HEADS[heads], sharing=[2, 0, 3, 5], num_shared=num_shared)


@pytest.mark.parametrize("pairs", [16, 64])
def test_attention_to_shared_blocks_in_more_tiles_of_rows(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head norms; tiles of pairs end within a row, and some hold no row that shares."""
    monkeypatch.setattr(shared_attention, "CONFIG", SharedConfig(pairs, 4, 1))
    lengths = [150] * 9 + [90] * 20
    check_attention(lengths, HEADS["group-of-7"], sharing=[0, *range(3, 9)], num_shared=2, qk_norm=True)


def test_shared_blocks_do_not_matter_in_a_window() -> None:
    check_attention([200, 300], HEADS["gqa"], window=100, sharing=[0, 1], num_shared=3)


@pytest.mark.parametrize(("splits", "window"), [(1, 0), (1, 100), (2, 0), (8, 70)])
@pytest.mark.parametrize("heads", ["gqa", "group-of-7"])
def test_attention_sinks(heads: str, splits: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "choose_splits", lambda *_: splits)
    check_attention(ROWS["long"], HEADS[heads], window=window, has_sinks=True)


def check_attention(
    lengths: list[int],
    heads: HeadShape,
    *,
    window: int = 0,
    qk_norm: bool = False,
    has_sinks: bool = False,
    sharing: Sequence[int] = (),
    num_shared: int = 0,
) -> None:
    seed = len(lengths) + window
    case = make_attention(
        lengths, heads, window=window, qk_norm=qk_norm, has_sinks=has_sinks, seed=seed, sharing=sharing,
        num_shared=num_shared,
    )  # fmt: skip
    layer, rows = case.layer, case.rows
    expected_cache = case.kv_cache.clone()
    expected = case.expected(expected_cache)
    out = torch.full_like(expected, torch.nan)
    scratch = AttentionScratch.allocate(heads, 32, CPU)
    assert scratch.shared is not None
    for part in (scratch, scratch.shared):
        for tensor in (part.acc_f, part.max_f, part.sum_f):
            tensor.fill_(torch.nan)
    for launch in attend(layer, case.qkv_ro, case.kv_cache, rows, scratch, out):
        run(launch)
    assert relative_error(out, expected) < 1e-5
    assert relative_error(case.kv_cache, expected_cache) < 1e-6
