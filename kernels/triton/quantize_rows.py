"""Rows of activations to e4m3 with one scale each (kernels/reference/quantize_rows.py), before an fp8 product.

A program owns a row and holds it in registers between finding its scale and storing it. As a `Launch` for chains of
dependent launches (decode steps), or at once over any number of rows.

Shape suffixes: r rows, k features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.quantize_rows import FP8
from octavo.kernels.triton.handles import launch
from octavo.kernels.triton.launch import Launch


@triton.jit
def quantize_rows_kernel(x_rk, number_rk, scale_r, K: tl.constexpr, K_P2: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K_P2)
    inside = k < K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_rk + row * K + k, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / 448.0
    tl.store(number_rk + row * K + k, (x / scale).to(number_rk.dtype.element_ty), mask=inside)
    tl.store(scale_r + row, scale)


def quantize_launch(x_rk: Tensor, number_rk: Tensor, scale_r: Tensor) -> Launch:
    """Rows of x (dense) into `number_rk` (dense; e4m3, or fp32 to leave the numbers unrounded) and `scale_r`."""
    num_rows, width = x_rk.shape
    assert x_rk.is_contiguous()
    assert number_rk.is_contiguous()
    args = {"x_rk": x_rk, "number_rk": number_rk, "scale_r": scale_r}
    return Launch(quantize_rows_kernel, (num_rows,), args, _sizes(width), num_warps=_warps(width))


def quantize_rows(x_rk: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference, on a CUDA device that has e4m3 (sm_89 and later)."""
    number_rk = torch.empty(x_rk.shape, dtype=FP8, device=x_rk.device)
    scale_r = torch.empty(x_rk.shape[0], dtype=torch.float32, device=x_rk.device)
    num_rows, width = x_rk.shape
    if num_rows:
        args = (x_rk.contiguous(), number_rk, scale_r)
        constants = _sizes(width) | {"PDL": False}
        launch(quantize_rows_kernel, (num_rows, 1, 1), args, constants, num_warps=_warps(width))
    return number_rk, scale_r


def _sizes(width: int) -> dict[str, int]:
    return {"K": width, "K_P2": triton.next_power_of_2(width)}


def _warps(width: int) -> int:
    """So that a thread loads at least 16 bytes at a time."""
    return 4 if width <= 2048 else 8 if width <= 4096 else 16
