"""What recurrent layers are made of: parameters and products of one type, on one device, below one checkpoint name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from octavo.layers.linear import Choice, Linear


@dataclass(frozen=True, slots=True)
class Parts:
    """Makes the parts of a layer whose checkpoint names begin with `prefix`."""

    prefix: str
    choose: Choice
    dtype: torch.dtype
    device: torch.device

    def vector(self, *shape: int, kept: torch.dtype | None = None) -> nn.Parameter:
        """An unfilled parameter; `kept`: its type, where it is not the layer's."""
        return nn.Parameter(torch.empty(shape, dtype=kept or self.dtype, device=self.device), requires_grad=False)

    def linear(
        self, inputs: int, sizes: Mapping[str, int], *, bias: bool = False, choose: Choice | None = None
    ) -> Linear:
        """A product; `sizes`: features by the checkpoint's names below the prefix, `choose`: not the layer's choice."""
        shards = {f"{self.prefix}.{name}": size for name, size in sizes.items()}
        return Linear(inputs, shards, bias=bias, dtype=self.dtype, device=self.device, choose=choose or self.choose)
