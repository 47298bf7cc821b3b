"""Weights in MXFP4 (OCP Microscaling Formats 1.0): numbers of 4 bits (e2m1), 32 of which share a power of two. Only
their conversion to plain numbers.

Shape suffixes: n rows of a matrix (any leading dims), b blocks of a row, j bytes of a block (16), k columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""By their bits."""
SCALE_BIAS = 127
PIECE = 1 << 20
"""Blocks that are converted at a time."""


def dequantize(blocks_nbj: Tensor, scales_nb: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[n, k = 32 b]; both uint8. A byte holds two numbers, the first in its low half; a scale is 2 ** (s - 127). All
    products are exact in bf16."""
    values = torch.tensor(E2M1, dtype=dtype, device=blocks_nbj.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    flat, scales = blocks_nbj.flatten(0, -2), scales_nb.flatten()
    out = torch.empty(*flat.shape, 2, dtype=dtype, device=flat.device)
    for piece, bits, scale in zip(*(torch.split(x, PIECE) for x in (out, flat, scales)), strict=True):
        torch.ldexp(pairs[bits.int()], scale.int()[:, None, None] - SCALE_BIAS, out=piece)
    return out.view(*scales_nb.shape[:-1], -1)
