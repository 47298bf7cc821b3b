"""RMS norm over the last dim, alone or with the residual addition before it.

The mean of squares is taken in fp32; the normed row is rounded to its dtype before the gain, as Transformers does, but
not before a gain in fp32 (Gemma's).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_tm: Tensor, gain_m: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gain in x's dtype."""
    wide_tm = x_tm.float()
    normed_tm = wide_tm * torch.rsqrt(wide_tm.square().mean(-1, keepdim=True) + eps)
    if gain_m.dtype == torch.float32:
        return (normed_tm * gain_m).to(x_tm.dtype)
    return normed_tm.to(x_tm.dtype) * gain_m


def add_rms_norm(x_tm: Tensor, residual_tm: Tensor, gain_m: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total_tm = x_tm + residual_tm
    return rms_norm(total_tm, gain_m, eps), total_tm
