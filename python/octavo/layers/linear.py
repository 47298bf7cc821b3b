"""Linear layers, fused where a checkpoint keeps several matrices that read the same input (q, k, v; gate, up).

A `Linear` knows its shape and which checkpoint tensors it is stacked from; how weights are kept and multiplied is its
`LinearMethod`'s business (`Dense` here, quantized ones in quant/<method>.py). Not here: names in a whole checkpoint.

Shape suffixes: t tokens, i input features, o output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Product(Protocol):
    """What decides how a matrix is kept: sizes, and the checkpoint names (to output features) that it is made of."""

    in_features: int
    out_features: int
    shards: dict[str, int]


Form = Literal["wide", "channels", "squares"]
"""Of a matrix: plain numbers, or e4m3 with a scale an output channel, or one a square of 128 x 128."""


class LinearMethod(Protocol):
    """How a linear layer stores its weights, fills them and multiplies."""

    form: Form

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Register the layer's parameters, uninitialised."""

    def slots(self, layer: Linear) -> dict[str, Tensor]:
        """Checkpoint name -> the part of a parameter that it fills, for every tensor of the layer."""

    def finish(self, layer: Linear) -> None:
        """Called once, when every slot is filled; may change how the layer keeps its weights."""

    def apply(self, layer: Linear, x_ti: Tensor) -> Tensor:
        """The product [t, o]."""


class Dense:
    """Weights in the model's dtype: `weight` [o, i], `bias` [o]; checkpoint tensors are stacked along o."""

    form: Form = "wide"

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """See `LinearMethod.create`."""
        shape = (layer.out_features, layer.in_features)
        layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        layer.weight_scale = None
        layer.bias = None
        if layer.has_bias:
            layer.bias = nn.Parameter(torch.empty(shape[:1], dtype=dtype, device=device), requires_grad=False)

    def slots(self, layer: Linear) -> dict[str, Tensor]:
        """See `LinearMethod.slots`; names are `<shard>.weight` and `<shard>.bias`."""
        found: dict[str, Tensor] = {}
        start = 0
        for name, size in layer.shards.items():
            found[f"{name}.weight"] = layer.weight.narrow(0, start, size)
            if layer.bias is not None:
                found[f"{name}.bias"] = layer.bias.narrow(0, start, size)
            start += size
        return found

    def finish(self, layer: Linear) -> None:
        """See `LinearMethod.finish`: nothing to do."""

    def apply(self, layer: Linear, x_ti: Tensor) -> Tensor:
        """See `LinearMethod.apply`."""
        return F.linear(x_ti, layer.weight, layer.bias)


DENSE = Dense()


def dense(layer: Product) -> LinearMethod:
    """The choice of `Dense` for every layer."""
    return DENSE


Choice = Callable[[Product], LinearMethod]
"""Which method a layer (which has no parameter yet) uses."""


class Choices(NamedTuple):
    """Those of a block's parts."""

    mixer: Choice
    """Of attention, or what stands in its place."""
    mlp: Choice


class Linear(nn.Module):
    """x W^T + b. `shards` maps checkpoint names to their output features, in stacking order."""

    weight: nn.Parameter
    weight_scale: nn.Parameter | None
    """fp32, of a weight in e4m3: [o], or of squares (quant/fp8_squares.py)."""
    share: int
    """Output features with equal scales of squares; 0: there are none."""
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        choose: Choice = dense,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.shards = dict(shards)
        self.out_features = sum(self.shards.values())
        self.has_bias = bias
        self.dtype, self.share = dtype, 0
        self.method = choose(self)
        self.method.create(self, dtype, device)

    def slots(self) -> dict[str, Tensor]:
        """Where each checkpoint tensor of this layer goes."""
        return self.method.slots(self)

    def forward(self, x_ti: Tensor) -> Tensor:
        """[t, i] -> [t, o]."""
        return self.method.apply(self, x_ti)
