"""Matrices in e4m3 with a scale for every square of SIDE x SIDE numbers, and rows with one for every SIDE numbers: how
DeepSeek-V3 keeps weights and activations (technical report, section 3.3.2). Products are summed in fp32, both scales
applied to what SIDE features give.

Squares at a matrix' lower and right border may be partial. A matrix stacked from parts has squares of each part; where
parts do not begin at a multiple of SIDE, scales are repeated for every `share` rows, a divisor of where they begin.

Shape suffixes: r rows, n output features, k input features, g groups of SIDE input features, s groups of `share`
output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.quantize_rows import FP8, LARGEST, LEAST

SIDE = 128


def num_groups(width: int, size: int = SIDE) -> int:
    """Of so many features; the last one may be partial."""
    return -(-width // size)


def quantize_groups(x_rk: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [r, k], fp32 scales [g, r]); a group's largest number becomes 448."""
    x_rk = x_rk.float()
    parts = [part.abs().amax(-1) for part in x_rk.split(SIDE, dim=-1)]
    scale_gr = torch.stack(parts).clamp_min(LEAST) / LARGEST
    return (x_rk / expand_groups(scale_gr, x_rk.shape[1])).clamp_(-LARGEST, LARGEST).to(FP8), scale_gr


def expand_groups(scale_gr: Tensor, width: int) -> Tensor:
    """[r, k], each group's scale for all of its features."""
    return scale_gr.t().repeat_interleave(SIDE, dim=-1)[:, :width]


def dequantize_groups(number_rk: Tensor, scale_gr: Tensor) -> Tensor:
    """fp32 [r, k]."""
    return number_rk.float() * expand_groups(scale_gr, number_rk.shape[1])


def quantize_squares(weight_nk: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [n, k], fp32 scales [n / SIDE, g], rounded up); a square's largest number becomes 448."""
    wide_nk = weight_nk.float()
    rows = [part.abs().amax(0) for part in wide_nk.split(SIDE)]
    columns = torch.stack(rows).split(SIDE, dim=1)
    scale_sg = torch.stack([part.amax(1) for part in columns], 1).clamp_min(LEAST) / LARGEST
    number_nk = (wide_nk / expand_squares(scale_sg, wide_nk.shape)).clamp_(-LARGEST, LARGEST).to(FP8)
    return number_nk, scale_sg


def expand_squares(scale_sg: Tensor, shape: torch.Size, share: int = SIDE) -> Tensor:
    """The scale of every number of matrices [..., n, k]."""
    wide = scale_sg.repeat_interleave(share, dim=-2)[..., : shape[-2], :]
    return wide.repeat_interleave(SIDE, dim=-1)[..., : shape[-1]]


def dequantize_squares(number_nk: Tensor, scale_sg: Tensor, share: int = SIDE) -> Tensor:
    """fp32 matrices [..., n, k]."""
    return number_nk.float() * expand_squares(scale_sg, number_nk.shape, share)


def square_product(
    x: Tensor | tuple[Tensor, Tensor], number_nk: Tensor, scale_sg: Tensor, bias_n: Tensor | None, share: int = SIDE
) -> Tensor:
    """fp32 [r, n]; x wide [r, k], or quantized by groups."""
    x_rk = x.float() if isinstance(x, Tensor) else dequantize_groups(*x)
    y_rn = x_rk @ dequantize_squares(number_nk, scale_sg, share).t()
    return y_rn if bias_n is None else y_rn + bias_n.float()
