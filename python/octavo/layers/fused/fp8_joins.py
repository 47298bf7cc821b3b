"""Norms and gated activations whose rows go into an fp8 product only: kernels that quantize them on the way
(kernels/triton/quantized_joins.py) take the place of those that joins.py gave, for as many rows as the product wants
quantized.

Such a module then yields `Fp8Rows` or `Fp8Groups` instead of a tensor, which an fp8 layer takes as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, cast

from torch import Tensor

from octavo.kernels.reference.squares import SIDE
from octavo.kernels.triton import quantized_joins
from octavo.kernels.triton.handles import only_compiling
from octavo.layers.activation import GatedActivation
from octavo.layers.fused.joins import SILU
from octavo.layers.linear import Form, Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.quant.fp8 import Fp8Rows, multiplies_fp8
from octavo.layers.quant.fp8_squares import WIDE_ROWS, Fp8Groups


class Wanted(NamedTuple):
    """How a product wants its rows."""

    name: Callable[[Tensor, Tensor], Fp8Rows | Fp8Groups]
    group: int
    """Features with one scale; 0: all of a row."""
    few: int
    """Up to so many rows are not quantized."""


WANTED: Final[dict[Form, Wanted]] = {
    "channels": Wanted(Fp8Rows, 0, 0),
    "squares": Wanted(Fp8Groups, SIDE, WIDE_ROWS),
}


def quantize_between(maker: RMSNorm | GatedActivation, consumer: Linear, *, pdl: bool) -> None:
    """Join them, where the consumer (the only reader of what is made) multiplies in fp8. `pdl`: dependent launches."""
    wanted = WANTED.get(consumer.method.form)
    if wanted is None or not multiplies_fp8(consumer.weight.device):
        return
    group = wanted.group
    if isinstance(maker, RMSNorm):
        maker.norm = _rows(maker.norm, partial(quantized_joins.rms_norm, group=group, pdl=pdl), wanted)
        maker.add = _sum_and_rows(maker.add, partial(quantized_joins.add_rms_norm, group=group, pdl=pdl), wanted)
    elif maker.name in SILU:
        maker.run = _rows(maker.run, partial(quantized_joins.gated_silu, group=group, pdl=pdl), wanted)


def _rows(
    plain: Callable[..., Tensor], make: Callable[..., tuple[Tensor, Tensor]], wanted: Wanted
) -> Callable[..., Tensor]:
    """Name what a kernel gives. A layer's input is typed as a tensor everywhere; only fp8 layers get these."""

    def run(x: Tensor, *args: Any) -> Tensor | Fp8Rows | Fp8Groups:
        if x.shape[0] <= wanted.few:
            if only_compiling():  # for steps of more rows
                make(x, *args)
            return plain(x, *args)
        return wanted.name(*make(x, *args))

    return cast(Callable[..., Tensor], run)


def _sum_and_rows(
    plain: Callable[..., tuple[Tensor, Tensor]],
    make: Callable[..., tuple[tuple[Tensor, Tensor], Tensor]],
    wanted: Wanted,
) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(x: Tensor, *args: Any) -> tuple[Tensor | Fp8Rows | Fp8Groups, Tensor]:
        if x.shape[0] <= wanted.few:
            if only_compiling():
                make(x, *args)
            return plain(x, *args)
        rows, total = make(x, *args)
        return wanted.name(*rows), total

    return cast(Callable[..., tuple[Tensor, Tensor]], run)
