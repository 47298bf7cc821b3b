"""Norms and gated activations whose rows go into an fp8 product only: kernels that quantize them on the way
(kernels/triton/quantized_joins.py) take the place of those that joins.py gave.

Such a module then yields `Fp8Rows` instead of a tensor, which an fp8 layer takes as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor

from octavo.kernels.triton import quantized_joins
from octavo.layers.activation import GatedActivation
from octavo.layers.fused.joins import SILU
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.quant.fp8 import Fp8Rows, multiplies_fp8


def quantize_between(maker: RMSNorm | GatedActivation, consumer: Linear, *, pdl: bool) -> None:
    """Join them, where the consumer (the only reader of what is made) multiplies in fp8. `pdl`: dependent launches."""
    if consumer.weight_scale is None or not multiplies_fp8(consumer.weight.device):
        return
    if isinstance(maker, RMSNorm):
        maker.norm = _rows(partial(quantized_joins.rms_norm, pdl=pdl))
        maker.add = _sum_and_rows(partial(quantized_joins.add_rms_norm, pdl=pdl))
    elif maker.name in SILU:
        maker.run = _rows(partial(quantized_joins.gated_silu, pdl=pdl))


def _rows(make: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Name what a kernel gives. A layer's input is typed as a tensor everywhere; only fp8 layers get these."""
    return cast(Callable[..., Tensor], lambda *args: Fp8Rows(*make(*args)))


def _sum_and_rows(make: Callable[..., tuple[tuple[Tensor, Tensor], Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(*args: Any) -> tuple[Fp8Rows, Tensor]:
        rows, total = make(*args)
        return Fp8Rows(*rows), total

    return cast(Callable[..., tuple[Tensor, Tensor]], run)
