"""What a block's layers are made of: parameters, products and norms of one type, on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from octavo.layers.linear import Choice, Linear
from octavo.layers.norm import LayerNorm, NormSpec, RMSNorm, make_norm


@dataclass(frozen=True, slots=True)
class Parts:
    """Makes the parts of a layer, none of them filled."""

    choose: Choice
    dtype: torch.dtype
    device: torch.device
    prefix: str = ""
    """What the checkpoint's names of products begin with."""

    def below(self, prefix: str) -> Parts:
        """The same for a layer whose checkpoint names begin with `prefix`."""
        return replace(self, prefix=prefix)

    def parameter(self, *shape: int, kept: torch.dtype | None = None) -> nn.Parameter:
        """`kept`: its type, where it is not the layer's."""
        return nn.Parameter(torch.empty(shape, dtype=kept or self.dtype, device=self.device), requires_grad=False)

    def linear(
        self, inputs: int, sizes: Mapping[str, int], *, bias: bool = False, choose: Choice | None = None
    ) -> Linear:
        """A product; `sizes`: features by the checkpoint's names below the prefix, `choose`: not the layer's choice."""
        shards = {f"{self.prefix}.{name}" if self.prefix else name: size for name, size in sizes.items()}
        return Linear(inputs, shards, bias=bias, dtype=self.dtype, device=self.device, choose=choose or self.choose)

    def norm(self, spec: NormSpec, dim: int) -> RMSNorm | LayerNorm:
        """A norm over `dim`."""
        return make_norm(spec, dim, dtype=self.dtype, device=self.device)
