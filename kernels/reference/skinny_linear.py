"""What the skinny products compute (kernels/triton/skinny_linear.py), with the norms where a model has them.

Shape suffixes: m rows, n output features, k input features, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x_mn: Tensor, gain_n: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gain, fp32."""
    x_mn = x_mn.float()
    return x_mn * torch.rsqrt(x_mn.square().mean(-1, keepdim=True) + eps) * gain_n.float()


def linear(x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None) -> Tensor:
    """x W^T + bias, fp32."""
    return F.linear(x_mk.float(), weight_nk.float(), None if bias_n is None else bias_n.float())


def gated_linear(x_mk: Tensor, gate_up_2nk: Tensor, bias_2n: Tensor | None) -> Tensor:
    """silu(gate) * up of the stacked product, fp32."""
    gate_mn, up_mn = linear(x_mk, gate_up_2nk, bias_2n).chunk(2, dim=-1)
    return F.silu(gate_mn) * up_mn


def add_linear(residual_mn: Tensor, x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None) -> Tensor:
    """residual + x W^T + bias, in the residual's dtype."""
    return (residual_mn.float() + linear(x_mk, weight_nk, bias_n)).to(residual_mn.dtype)
