"""Numbers in 8 bits (e4m3) with one scale a row: how fp8 products keep activations and weights.

Shape suffixes: r rows, k features.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3."""
STEPS = 16
MOST_AT_ONCE = 1 << 24
"""Numbers of a matrix that are rounded together: a bound on memory."""
LEAST = 1e-12
"""A row's largest number counts as at least this, so that rows of zeros have a scale."""


def quantize_rows(x_rk: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [r, k], fp32 scales [r]) with number * scale nearest to x; a row's largest number becomes 448.

    Error: at most 1/16 of a number above scale / 64, about 2.6% of a row's norm for normal numbers.
    """
    x_rk = x_rk.float()
    scale_r = x_rk.abs().amax(-1).clamp_min(LEAST) / LARGEST
    return (x_rk / scale_r[:, None]).clamp_(-LARGEST, LARGEST).to(FP8), scale_r


def quantize_weights(weight_rk: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_rows`, each row with that scale out of STEPS, from the same to nearly twice it, whose squared error
    is least (beyond twice it all repeats but for the least numbers). For weights: it costs STEPS times as much."""
    numbers, scales = [], []
    for part_rk in weight_rk.split(max(1, MOST_AT_ONCE // weight_rk.shape[1])):
        wide_rk = part_rk.float()
        base_r = wide_rk.abs().amax(-1).clamp_min(LEAST) / LARGEST
        best_r, least_r = base_r, torch.full_like(base_r, torch.inf)
        for step in range(STEPS):
            scale_r = base_r * 2 ** (step / STEPS)
            rounded_rk = (wide_rk / scale_r[:, None]).clamp_(-LARGEST, LARGEST).to(FP8)
            error_r = (dequantize_rows(rounded_rk, scale_r) - wide_rk).square().sum(-1)
            best_r = torch.where(error_r < least_r, scale_r, best_r)
            least_r = torch.minimum(error_r, least_r)
        numbers.append((wide_rk / best_r[:, None]).clamp_(-LARGEST, LARGEST).to(FP8))
        scales.append(best_r)
    return _joined(numbers), torch.cat(scales)


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows of all parts (torch can't join e4m3 everywhere: as bytes)."""
    return torch.cat([part.view(torch.uint8) for part in parts]).view(FP8)


def dequantize_rows(number_rk: Tensor, scale_r: Tensor) -> Tensor:
    """fp32 [r, k]."""
    return number_rk.float() * scale_r.float()[:, None]
