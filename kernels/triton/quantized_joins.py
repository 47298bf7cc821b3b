"""What lies between fp8 products, with the next product's rows quantized as they are made (rms_norm.py and gated.py do
the same without): norms, and silu(gate) * up. One program a row, which it holds in registers until its scale is known.

Values are rounded to the model's type before they are quantized, so that results are those of the two steps apart.

Shape suffixes: t tokens, m model dim, i inner dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.activations import activated
from octavo.kernels.triton.handles import launch
from octavo.kernels.triton.quantize_rows import allocate_rows, sizes_of, store_quantized


@triton.jit(do_not_specialize=["stride"])
def quantized_norm_kernel(
    x_ptr, residual_ptr, gain_ptr, number_ptr, scale_ptr, stride, eps,
    K: tl.constexpr, K_P2: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ADD: residual += x first, and its norm is taken."""
    row = tl.program_id(0).to(tl.int64)
    dim_m = tl.arange(0, K_P2)
    inside = dim_m < K
    gain_m = tl.load(gain_ptr + dim_m, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_m = tl.load(x_ptr + row * K + dim_m, mask=inside, other=0.0)
    if ADD:
        residual_m = tl.load(residual_ptr + row * K + dim_m, mask=inside, other=0.0)
        x_m = (x_m.to(tl.float32) + residual_m.to(tl.float32)).to(x_m.dtype)
        tl.store(residual_ptr + row * K + dim_m, x_m, mask=inside)
    wide_m = x_m.to(tl.float32)
    normed_m = wide_m * tl.rsqrt(tl.sum(wide_m * wide_m, 0) / K + eps)
    if gain_m.dtype != tl.float32:
        normed_m = normed_m.to(x_m.dtype)
    gained_m = (normed_m.to(tl.float32) * gain_m.to(tl.float32)).to(x_m.dtype)
    store_quantized(gained_m.to(tl.float32), number_ptr, scale_ptr, row, stride, K, K_P2, GROUP)


@triton.jit(do_not_specialize=["stride"])
def quantized_silu_kernel(
    gate_up_ptr, number_ptr, scale_ptr, stride,
    K: tl.constexpr, K_P2: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rounds silu(gate) before the product, as `reference.gated` does."""
    row = tl.program_id(0).to(tl.int64)
    dim_i = tl.arange(0, K_P2)
    inside = dim_i < K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate_i = tl.load(gate_up_ptr + row * (2 * K) + dim_i, mask=inside, other=0.0)
    up_i = tl.load(gate_up_ptr + row * (2 * K) + K + dim_i, mask=inside, other=0.0)
    active_i = activated(gate_i.to(tl.float32), "silu").to(gate_i.dtype)
    result_i = (active_i.to(tl.float32) * up_i.to(tl.float32)).to(gate_i.dtype)
    store_quantized(result_i.to(tl.float32), number_ptr, scale_ptr, row, stride, K, K_P2, GROUP)


def rms_norm(x_tm: Tensor, gain_m: Tensor, eps: float, *, group: int = 0, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """The norm of contiguous rows, as (numbers, scales); with a `group`, one for every so many features."""
    return _norm(x_tm, x_tm, gain_m, eps, is_sum=False, group=group, pdl=pdl)


def add_rms_norm(
    x_tm: Tensor, residual_tm: Tensor, gain_m: Tensor, eps: float, *, group: int = 0, pdl: bool = False
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((numbers, scales) of the norm, sum in the residual's memory)."""
    return _norm(x_tm, residual_tm, gain_m, eps, is_sum=True, group=group, pdl=pdl), residual_tm


def _norm(
    x_tm: Tensor, residual_tm: Tensor, gain_m: Tensor, eps: float, *, is_sum: bool, group: int, pdl: bool
) -> tuple[Tensor, Tensor]:
    assert x_tm.is_contiguous()
    assert residual_tm.is_contiguous()
    rows, width = x_tm.shape
    number_tm, scale = allocate_rows(rows, width, x_tm.device, group)
    if rows:
        constants = sizes_of(width, group) | {"ADD": is_sum, "PDL": pdl}
        args = (x_tm, residual_tm, gain_m, number_tm, scale, scale.stride(0), eps)
        launch(quantized_norm_kernel, (rows, 1, 1), args, constants, num_warps=8 if width > 2048 else 4, pdl=pdl)
    return number_tm, scale


def gated_silu(gate_up_t2i: Tensor, *, group: int = 0, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of contiguous rows, as (numbers, scales)."""
    assert gate_up_t2i.is_contiguous()
    rows, width = gate_up_t2i.shape[0], gate_up_t2i.shape[1] // 2
    number_ti, scale = allocate_rows(rows, width, gate_up_t2i.device, group)
    if rows:
        constants = sizes_of(width, group) | {"PDL": pdl}
        args = (gate_up_t2i, number_ti, scale, scale.stride(0))
        launch(quantized_silu_kernel, (rows, 1, 1), args, constants, num_warps=8 if width <= 4096 else 16, pdl=pdl)
    return number_ti, scale
