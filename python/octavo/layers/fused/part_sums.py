"""Products of a few hundred rows whose sum over k is finished by the norm after them: two products of half of k each,
in fp32, instead of one that cuBLAS splits and sums in a kernel of its own (5 to 14 us of a layer of Llama-3.1-8B at
160 to 224 rows: kernels/README.md). The norm's kernel adds the parts to the residual.

Such a layer then yields parts [p, t, o] instead of [t, o], which only the norm after it reads.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from octavo.kernels.triton.rms_norm import add_parts_rms_norm, add_rms_norm
from octavo.layers.linear import DENSE, Dense, Linear
from octavo.layers.norm import RMSNorm

FIRST_ROWS, LAST_ROWS = 129, 224
PARTS = 2
LEAST_FEATURES = 4096
"""Inputs and outputs of a layer that is large enough."""


def may_leave_parts(layer: Linear) -> bool:
    """Whether the layer's products are worth it: a large plain matrix."""
    return layer.method is DENSE and layer.bias is None and min(layer.in_features, layer.out_features) >= LEAST_FEATURES


def sum_between(maker: Linear, consumer: RMSNorm, *, pdl: bool) -> None:
    """Let the consumer (the only reader) add up what the maker leaves. `pdl`: as dependent launches."""
    if may_leave_parts(maker) and getattr(consumer.add, "func", None) is add_rms_norm:
        maker.method = InParts()
        consumer.add = partial(add_all, pdl=pdl)


def add_all(x: Tensor, residual_tm: Tensor, gain_m: Tensor, eps: float, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Of rows, or of parts of them."""
    add = add_rms_norm if x.ndim == residual_tm.ndim else add_parts_rms_norm
    return add(x, residual_tm, gain_m, eps, pdl=pdl)


class InParts(Dense):
    """Weights as `Dense` keeps them."""

    def apply(self, layer: Linear, x_ti: Tensor) -> Tensor:
        """Parts [p, t, o] for a few hundred rows, else the product [t, o]."""
        if not FIRST_ROWS <= x_ti.shape[0] <= LAST_ROWS:
            return super().apply(layer, x_ti)
        x_pti = torch.unflatten(x_ti, 1, (PARTS, -1)).transpose(0, 1)
        weight_pio = torch.unflatten(layer.weight, 1, (PARTS, -1)).permute(1, 2, 0)
        if x_ti.dtype == torch.float32:
            return torch.bmm(x_pti, weight_pio)
        return torch.bmm(x_pti, weight_pio, out_dtype=torch.float32)
