"""Scales of an fp8 product's rows and columns, and its bias, applied to what comes out of it, in place.

For products whose kernel takes one scale a matrix only (kernels/reference/quantize_rows.py says what the scales are).

Shape suffixes: t tokens, o output features.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch

BLOCK = 2048
"""Features of a program."""


@triton.jit
def scale_kernel(
    out_ptr, scale_t_ptr, scale_o_ptr, bias_ptr,
    DIM: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """BLOCK features of one token."""
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    feature_o = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = feature_o < DIM
    value_o = tl.load(out_ptr + token * DIM + feature_o, mask=inside, other=0.0).to(tl.float32)
    value_o = value_o * (tl.load(scale_t_ptr + token) * tl.load(scale_o_ptr + feature_o, mask=inside, other=0.0))
    if HAS_BIAS:
        value_o += tl.load(bias_ptr + feature_o, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * DIM + feature_o, value_o.to(out_ptr.dtype.element_ty), mask=inside)


def scale_product(out_to: Tensor, scale_t: Tensor, scale_o: Tensor, bias_o: Tensor | None) -> Tensor:
    """out * scale_t * scale_o + bias, computed in fp32, in out's memory (contiguous)."""
    assert out_to.is_contiguous()
    tokens, features = out_to.shape
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(features))
        blocks = triton.cdiv(features, block)
        constants = {"DIM": features, "BLOCKS": blocks, "BLOCK": block, "HAS_BIAS": bias_o is not None}
        args = (out_to, scale_t, scale_o, scale_o if bias_o is None else bias_o)
        launch(scale_kernel, (tokens * blocks, 1, 1), args, constants, num_warps=4)
    return out_to
