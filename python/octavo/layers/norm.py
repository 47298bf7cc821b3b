"""RMS normalization, alone or with the residual addition before it (one call, so that one kernel can do both).

The mean of squares is taken in fp32, the result is rounded to the input's dtype and then multiplied by the weight:
that order is Transformers' (LlamaRMSNorm).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, in x's dtype."""
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


class RMSNorm(nn.Module):
    """RMS norm with a learned weight [dim]. Kernels may take the place of `norm` and `add` (fused/joins.py)."""

    def __init__(self, dim: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
        self.add: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_rms_norm
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim."""
        return self.norm(x, self.weight, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalized sum, sum): the sum is the next residual. Both may be written where x and the residual were."""
        return self.add(x, residual, self.weight, self.eps)
