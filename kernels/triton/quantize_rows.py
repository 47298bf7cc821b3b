"""Rows to e4m3 with one scale each (kernels/reference/quantize_rows.py), or one for every group of their features
(squares.py there): of activations before an fp8 product, and of weights as they load, whose scales are the best of
several.

A program owns a row and holds it in registers between finding its scale and storing it. As a `Launch` for chains of
dependent launches (decode steps), or at once over any number of rows.

Shape suffixes: r rows, k features, g groups of features.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.quantize_rows import FP8, STEPS
from octavo.kernels.reference.squares import num_groups
from octavo.kernels.triton.handles import launch
from octavo.kernels.triton.launch import Launch

ROUND: Final = 4


@triton.jit
def store_quantized(
    value_k, number_ptr, scale_ptr, row, stride, K: tl.constexpr, K_P2: tl.constexpr, GROUP: tl.constexpr
):
    """One row's numbers and its scale; or the scales of its groups of GROUP features, `stride` apart. Values past the
    row's end are 0."""
    k = tl.arange(0, K_P2)
    if GROUP > 0:
        group = tl.arange(0, K_P2 // GROUP)
        value_gk = tl.reshape(value_k, K_P2 // GROUP, GROUP)
        scale_g = tl.maximum(tl.max(tl.abs(value_gk), 1), 1e-12) / 448.0
        tl.store(scale_ptr + group.to(tl.int64) * stride + row, scale_g, mask=group * GROUP < K)
        number_k = tl.reshape(value_gk / scale_g[:, None], K_P2)
    else:
        scale = tl.maximum(tl.max(tl.abs(value_k), 0), 1e-12) / 448.0
        tl.store(scale_ptr + row, scale)
        number_k = value_k * (1.0 / scale)
    tl.store(number_ptr + row * K + k, number_k.to(number_ptr.dtype.element_ty), mask=k < K)


@triton.jit(do_not_specialize=["stride"])
def quantize_rows_kernel(
    x_rk, number_rk, scale_gr, stride, K: tl.constexpr, K_P2: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K_P2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_rk + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    store_quantized(x, number_rk, scale_gr, row, stride, K, K_P2, GROUP)


@triton.jit
def quantize_weights_kernel(
    weight_rk, number_rk, scale_r, K: tl.constexpr, K_P2: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr
):
    """The scale of STEPS whose squared error is least, of equals the first."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K_P2)
    inside = k < K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.load(weight_rk + row * K + k, mask=inside, other=0.0).to(tl.float32)
    base = tl.maximum(tl.max(tl.abs(weight), 0), 1e-12) / 448.0
    best, least = base, base * float("inf")
    for step in range(STEPS):
        scale = base * tl.exp2(step.to(tl.float32) / STEPS)
        rounded = (weight / scale).to(number_rk.dtype.element_ty).to(tl.float32) * scale
        error = tl.sum((rounded - weight) * (rounded - weight), 0)
        best = tl.where(error < least, scale, best)
        least = tl.minimum(error, least)
    tl.store(number_rk + row * K + k, (weight / best).to(number_rk.dtype.element_ty), mask=inside)
    tl.store(scale_r + row, best)


def quantize_launch(x_rk: Tensor, number_rk: Tensor, scale_f: Tensor, *, group: int = 0, stride: int = 0) -> Launch:
    """Rows of x (dense) into `number_rk` (dense; e4m3, or fp32 to leave the numbers unrounded) and `scale_f`: of row r
    at r; with a `group` of so many features, of the row's group g at g * stride + r."""
    num_rows, width = x_rk.shape
    assert x_rk.is_contiguous()
    assert number_rk.is_contiguous()
    args = {"x_rk": x_rk, "number_rk": number_rk, "scale_gr": scale_f, "stride": stride}
    return Launch(quantize_rows_kernel, (num_rows,), args, sizes_of(width, group), num_warps=_warps(width))


def allocate_rows(rows: int, width: int, device: torch.device, group: int = 0) -> tuple[Tensor, Tensor]:
    """Room for (e4m3 [r, width], fp32 scales [r]; or of groups, [g, r]). With groups, rows that fill the last ROUND up
    follow in memory (`filled_up`): cuBLAS multiplies so many at once."""
    room = -(-rows // ROUND) * ROUND if group else rows
    shape = (num_groups(width, group), room) if group else (rows,)
    number_rk = torch.empty(room, width, dtype=FP8, device=device)
    scale = torch.empty(shape, dtype=torch.float32, device=device)
    return number_rk[:rows], scale[:, :rows] if group else scale


def filled_up(number_rk: Tensor, scale_gr: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of `allocate_rows` with groups, and those behind them, of which nothing is known."""
    (groups, room), width = (scale_gr.shape[0], scale_gr.stride(0)), number_rk.shape[1]
    return number_rk.as_strided((room, width), (width, 1)), scale_gr.as_strided((groups, room), (room, 1))


def quantize_rows(x_rk: Tensor, *, group: int = 0) -> tuple[Tensor, Tensor]:
    """As the reference (squares.py's for groups), on a CUDA device that has e4m3 (sm_89 and later)."""
    num_rows, width = x_rk.shape
    number_rk, scale = allocate_rows(num_rows, width, x_rk.device, group)
    if num_rows:
        args = (x_rk.contiguous(), number_rk, scale, scale.stride(0))
        constants = sizes_of(width, group) | {"PDL": False}
        launch(quantize_rows_kernel, (num_rows, 1, 1), args, constants, num_warps=_warps(width))
    return number_rk, scale


def weights_launch(weight_rk: Tensor, number_rk: Tensor, scale_r: Tensor) -> Launch:
    """Rows of a dense matrix into `number_rk` (dense, e4m3) and `scale_r`."""
    num_rows, width = weight_rk.shape
    args = {"weight_rk": weight_rk, "number_rk": number_rk, "scale_r": scale_r}
    return Launch(
        quantize_weights_kernel,
        (num_rows,),
        args,
        {"K": width, "K_P2": triton.next_power_of_2(width), "STEPS": STEPS},
        num_warps=_warps(width),
    )


def quantize_weights(weight_rk: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference, on a CUDA device that has e4m3, in one launch."""
    number_rk = torch.empty(weight_rk.shape, dtype=FP8, device=weight_rk.device)
    scale_r = torch.empty(weight_rk.shape[0], dtype=torch.float32, device=weight_rk.device)
    if weight_rk.shape[0]:
        weights_launch(weight_rk.contiguous(), number_rk, scale_r).run(pdl=False)
    return number_rk, scale_r


def sizes_of(width: int, group: int) -> dict[str, int]:
    """Constants of what stores quantized rows."""
    return {"K": width, "K_P2": max(triton.next_power_of_2(width), group), "GROUP": group}


def _warps(width: int) -> int:
    """So that a thread loads at least 16 bytes at a time."""
    return 4 if width <= 2048 else 8 if width <= 4096 else 16
