"""RMS norm of rows, alone or with the residual addition before it: one program a row.

Shape suffixes: t rows, m their width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, gain_ptr, out_ptr, eps,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ADD: residual += x first, and its norm is taken. Rounds where `reference.rms_norm` does."""
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


def _launch(
    x_tm: Tensor, residual_tm: Tensor, gain_m: Tensor, out_tm: Tensor, eps: float, *, is_sum: bool, pdl: bool
) -> None:
    assert x_tm.is_contiguous()
    assert residual_tm.is_contiguous()
    width = gain_m.shape[0]
    rows = x_tm.numel() // width
    if rows:
        constants = {"DIM": width, "DIM_PAD": triton.next_power_of_2(width), "ADD": is_sum, "PDL": pdl}
        warps = 8 if width > 2048 else 4
        launch(
            rms_norm_kernel, (rows, 1, 1), (x_tm, residual_tm, gain_m, out_tm, eps), constants, num_warps=warps, pdl=pdl
        )
