"""Products of one row (decode steps of a single sequence) in models whose decode steps are not fused as a whole: by
kernels/triton/gemv.py, which reads a small matrix in a fifth to two thirds of cuBLAS's time (2.5 us for 12.7 at 1024 x
2048 on an H200, 3.6 for 5.3 at 4096 x 1024; 13.5 for 15.3 at 6144 x 4096).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.kernels.triton.skinny_linear import ResidualStream, SkinnyLinear, store
from octavo.kernels.triton.skinny_table import choose
from octavo.layers.linear import Dense, Linear

DTYPES = (torch.bfloat16, torch.float16)
MOST_NUMBERS = 1 << 25
"""Of a matrix; cuBLAS is as quick with larger ones."""
ANY_OP = "qkv"
"""What a product counts as when its configuration is looked up."""


def use_vectors(model: nn.Module, *, pdl: bool, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """From now on the plain linear layers below `model` multiply single rows so. `pdl`: as dependent launches."""
    streams: dict[tuple[torch.dtype, torch.device], ResidualStream] = {}
    for layer in model.modules():
        if not isinstance(layer, Linear) or not isinstance(layer.method, Dense) or layer.weight.dtype not in dtypes:
            continue
        size = layer.out_features, layer.in_features
        if layer.weight.numel() > MOST_NUMBERS or choose(ANY_OP, *size, 1) is None:
            continue
        key = layer.weight.dtype, layer.weight.device
        if key not in streams:
            streams[key] = ResidualStream.allocate(16, *key)
        layer.method = OneRow(layer, streams[key], pdl=pdl)


class OneRow(Dense):
    """Weights as `Dense` keeps them. `stream` stands for what other epilogues of the kernel write to."""

    def __init__(self, layer: Linear, stream: ResidualStream, *, pdl: bool) -> None:
        self._usual = layer.method
        self._product = SkinnyLinear.make(ANY_OP, layer.weight, layer.bias)
        self._stream, self._pdl = stream, pdl

    def apply(self, layer: Linear, x_ti: Tensor) -> Tensor:
        """See `LinearMethod.apply`."""
        if x_ti.shape[0] != 1:
            return self._usual.apply(layer, x_ti)
        y_to = x_ti.new_empty(1, layer.out_features)
        store(self._product, x_ti, y_to, self._stream).run(pdl=self._pdl)
        return y_to
