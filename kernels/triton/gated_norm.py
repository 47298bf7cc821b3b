"""RMS norms of groups of features with a gate before or after: a program takes some groups of one token.

Shape suffixes: g groups of a program, d features of a group (padded).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch

FEATURES = 2048
"""Of a program, about."""


@triton.jit
def gated_norm_kernel(
    x_ptr, gate_ptr, gain_ptr, out_ptr, eps,
    X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TILE_G: tl.constexpr, GAIN_STRIDE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """FIRST: the gate comes before the norm. Rounds where `reference.gated_norm` does."""
    token = tl.program_id(1).to(tl.int64)
    group_g = tl.program_id(0) * TILE_G + tl.arange(0, TILE_G)[:, None]
    dim_d = tl.arange(0, DIM_PAD)[None, :]
    feature_gd = group_g * DIM + dim_d
    inside = (dim_d < DIM) & (feature_gd < WIDTH)
    x_gd = tl.load(x_ptr + token * X_STRIDE + feature_gd, mask=inside, other=0.0)
    gate_gd = tl.load(gate_ptr + token * GATE_STRIDE + feature_gd, mask=inside, other=0.0).to(tl.float32)
    gain_gd = tl.load(gain_ptr + group_g * GAIN_STRIDE + dim_d, mask=inside, other=0.0)
    gate_gd = gate_gd / (1.0 + tl.exp(-gate_gd))
    wide_gd = x_gd.to(tl.float32)
    if FIRST:
        wide_gd = wide_gd * gate_gd
    wide_gd = wide_gd * tl.rsqrt(tl.sum(wide_gd * wide_gd, 1) / DIM + eps)[:, None]
    result_gd = (wide_gd.to(x_gd.dtype).to(tl.float32) * gain_gd.to(tl.float32)).to(x_gd.dtype)
    if not FIRST:
        result_gd = (result_gd.to(tl.float32) * gate_gd).to(x_gd.dtype)
    tl.store(out_ptr + token * WIDTH + feature_gd, result_gd, mask=inside)


def gated_norm(x_ti: Tensor, gate_ti: Tensor, gain: Tensor, eps: float, *, group: int, gates_first: bool) -> Tensor:
    """As `kernels.reference.gated_norm.gated_norm`; a token's features are dense."""
    assert x_ti.stride(1) == gate_ti.stride(1) == 1
    tokens, width = x_ti.shape
    out_ti = torch.empty((tokens, width), dtype=x_ti.dtype, device=x_ti.device)
    if tokens:
        dim = triton.next_power_of_2(group)
        tile = min(max(1, FEATURES // dim), triton.next_power_of_2(width // group))
        constants = {
            "X_STRIDE": x_ti.stride(0),
            "GATE_STRIDE": gate_ti.stride(0),
            "WIDTH": width,
            "DIM": group,
            "DIM_PAD": dim,
            "TILE_G": tile,
            "GAIN_STRIDE": group if gain.shape[0] == width else 0,
            "FIRST": gates_first,
        }
        grid = (triton.cdiv(width // group, tile), tokens, 1)
        launch(gated_norm_kernel, grid, (x_ti, gate_ti, gain, out_ti, eps), constants, num_warps=4)
    return out_ti
