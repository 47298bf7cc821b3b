"""RMS norm of rows, alone or with the residual addition before it: one program a row.

Shape suffixes: t rows, m their width, p parts of a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch


@triton.jit(do_not_specialize=["part_stride"])
def rms_norm_kernel(
    x_ptr, residual_ptr, gain_ptr, out_ptr, eps, part_stride,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ADD: residual += x first, and its norm is taken; x is the sum of PARTS arrays. Rounds where `reference.rms_norm`
    does."""
    row = tl.program_id(0).to(tl.int64) * DIM
    dim_m = tl.arange(0, DIM_PAD)
    inside = dim_m < DIM
    gain_m = tl.load(gain_ptr + dim_m, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_m = tl.load(x_ptr + row + dim_m, mask=inside, other=0.0)
    if ADD:
        residual_m = tl.load(residual_ptr + row + dim_m, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            x_m += tl.load(x_ptr + part * part_stride + row + dim_m, mask=inside, other=0.0)
        x_m = x_m.to(residual_m.dtype)
        x_m = (x_m.to(tl.float32) + residual_m.to(tl.float32)).to(x_m.dtype)
        tl.store(residual_ptr + row + dim_m, x_m, mask=inside)
    wide_m = x_m.to(tl.float32)
    normed_m = wide_m * tl.rsqrt(tl.sum(wide_m * wide_m, 0) / DIM + eps)
    if gain_m.dtype != tl.float32:
        normed_m = normed_m.to(x_m.dtype)
    tl.store(out_ptr + row + dim_m, (normed_m.to(tl.float32) * gain_m.to(tl.float32)).to(x_m.dtype), mask=inside)


def rms_norm(x_tm: Tensor, gain_m: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """As `kernels.reference.rms_norm.rms_norm`, over the last dim."""
    x_tm = x_tm.contiguous()
    out_tm = torch.empty_like(x_tm)
    _launch(x_tm, x_tm, gain_m, out_tm, eps, is_sum=False, pdl=pdl)
    return out_tm


def add_rms_norm(
    x_tm: Tensor, residual_tm: Tensor, gain_m: Tensor, eps: float, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.rms_norm.add_rms_norm`, in the memory of x (the norm) and of the residual (the sum)."""
    _launch(x_tm, residual_tm, gain_m, x_tm, eps, is_sum=True, pdl=pdl)
    return x_tm, residual_tm


def add_parts_rms_norm(
    x_ptm: Tensor, residual_tm: Tensor, gain_m: Tensor, eps: float, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """As `add_rms_norm` of the sum over p of fp32 x, rounded to the residual's dtype; the norm is a new tensor."""
    out_tm = torch.empty_like(residual_tm)
    _launch(x_ptm, residual_tm, gain_m, out_tm, eps, is_sum=True, pdl=pdl)
    return out_tm, residual_tm


def _launch(
    x_tm: Tensor, residual_tm: Tensor, gain_m: Tensor, out_tm: Tensor, eps: float, *, is_sum: bool, pdl: bool
) -> None:
    assert x_tm.is_contiguous()
    assert residual_tm.is_contiguous()
    width = gain_m.shape[0]
    rows = residual_tm.numel() // width
    if rows:
        parts = x_tm.numel() // residual_tm.numel()
        constants = {"DIM": width, "DIM_PAD": triton.next_power_of_2(width), "ADD": is_sum, "PARTS": parts, "PDL": pdl}
        args = x_tm, residual_tm, gain_m, out_tm, eps, residual_tm.numel()
        launch(rms_norm_kernel, (rows, 1, 1), args, constants, num_warps=8 if width > 2048 else 4, pdl=pdl)
