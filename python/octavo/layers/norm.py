"""Normalization, alone or with the residual addition before it (one call, so that one kernel can do both).

RMS: the mean of squares is taken in fp32, the result is rounded to the input's dtype and then multiplied by the weight:
that order is Transformers' (LlamaRMSNorm). Weights in fp32 are multiplied before it is rounded (GemmaRMSNorm).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norms of a model."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    has_bias: bool = False
    """Of "layer"."""
    shift: float = 0.0
    """What a checkpoint's weights lack."""
    has_weight: bool = True
    """Otherwise it only normalizes: a checkpoint has nothing of it."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, in x's dtype."""
    normed = F.rms_norm(x.float(), weight.shape, None, eps)
    return (normed * weight).to(x.dtype) if weight.dtype == torch.float32 else normed.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def whole(x: Tensor, residual: Tensor) -> Tensor:
    """x, which may be in parts (fused/part_sums.py), as something like the residual."""
    return x if x.ndim == residual.ndim else x.sum(0).to(residual.dtype)


class RMSNorm(nn.Module):
    """RMS norm with a learned weight [dim]. Kernels may take the place of `norm` and `add` (fused/joins.py)."""

    def __init__(self, dim: int, spec: NormSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps, self.shift, self.has_weight = spec.eps, spec.shift, spec.has_weight
        self.norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
        self.add: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_rms_norm
        dtype = torch.float32 if spec.shift else dtype  # 1 + w of a small w would lose w's digits
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim."""
        return self.norm(x, self.weight, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalized sum, sum): the sum is the next residual. Both may be written where x and the residual were."""
        return self.add(x, residual, self.weight, self.eps)

    def slots(self, name: str) -> dict[str, Tensor]:
        """Where the tensors of a checkpoint's norm `name` go."""
        return {f"{name}.weight": self.weight} if self.has_weight else {}

    def finish(self) -> None:
        """Once, when the slots are filled."""
        if self.shift:
            self.weight.add_(self.shift)


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias [dim]; the same calls as `RMSNorm`'s."""

    def __init__(self, dim: int, spec: NormSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps, self.shift, self.has_weight = spec.eps, spec.shift, spec.has_weight
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype, device=device), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if spec.has_bias:
            self.bias = nn.Parameter(torch.empty(dim, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalized sum, sum)."""
        total = x + residual
        return self(total), total

    def slots(self, name: str) -> dict[str, Tensor]:
        """Where the tensors of a checkpoint's norm `name` go."""
        found: dict[str, Tensor] = {f"{name}.weight": self.weight} if self.has_weight else {}
        if self.bias is not None:
            found[f"{name}.bias"] = self.bias
        return found

    def finish(self) -> None:
        """Once, when the slots are filled."""
        if self.shift:
            self.weight.add_(self.shift)


class NoNorm(nn.Module):
    """Stands where a block has no norm; only sums."""

    def forward(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, sum)."""
        total = x + residual
        return total, total

    def slots(self, name: str) -> dict[str, Tensor]:
        """A checkpoint has nothing for it."""
        return {}


Norm = RMSNorm | LayerNorm | NoNorm


def make_norm(spec: NormSpec, dim: int, *, dtype: torch.dtype, device: torch.device) -> RMSNorm | LayerNorm:
    """Of a kind, over `dim`."""
    return (LayerNorm if spec.kind == "layer" else RMSNorm)(dim, spec, dtype=dtype, device=device)
