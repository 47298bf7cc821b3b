"""Products with a single row, the decode steps of one sequence, where steps are not fused as a whole: the kernel that
those use (kernels/triton/gemv.py) instead of the library's, which reads weights at half the speed.

Shape suffixes: i input features, o output features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from octavo.kernels.triton.skinny_linear import ResidualStream, SkinnyLinear, store
from octavo.kernels.triton.skinny_table import Config, Gemv, choose
from octavo.layers.embedding import Embedding
from octavo.layers.linear import DENSE, Linear

LEAST_COLUMNS = 32
ROWS_AT_A_TIME = 8


class OneRow:
    """x W^T + b of x [1, i], in x's dtype or another."""

    def __init__(self, weight_oi: Tensor, bias_o: Tensor | None, dtype: torch.dtype, *, pdl: bool) -> None:
        config = choose_config(*weight_oi.shape)
        assert config is not None
        self._linear = SkinnyLinear("qkv", weight_oi, bias_o, {1: config})
        self._stream = ResidualStream.allocate(1, weight_oi.dtype, weight_oi.device)  # not used by such a product
        self._dtype, self._pdl = dtype, pdl

    def __call__(self, x_1i: Tensor) -> Tensor:
        """[1, o]."""
        y_1o = x_1i.new_empty(1, self._linear.n, dtype=self._dtype)
        store(self._linear, x_1i.contiguous(), y_1o, self._stream).run(pdl=self._pdl)
        return y_1o


def choose_config(rows: int, columns: int) -> Config | None:
    """How a matrix is read; None: it can't be."""
    found = choose("qkv", rows, columns, 1)
    if found is not None:
        return found
    block = math.gcd(columns, 512)
    return Gemv(ROWS_AT_A_TIME, block, 4) if rows % ROWS_AT_A_TIME == 0 and block >= LEAST_COLUMNS else None


def use_one_row(model: nn.Module, *, pdl: bool) -> None:
    """Give every plain linear layer and head below `model` its kernel, if its sizes allow."""
    for module in model.modules():
        if isinstance(module, Linear) and module.method is DENSE and choose_config(*module.weight.shape):
            module.one_row = OneRow(module.weight, module.bias, module.dtype, pdl=pdl)
        elif isinstance(module, Embedding) and choose_config(*module.weight.shape):
            module.one_row = OneRow(module.weight, None, torch.float32, pdl=pdl)
