"""silu(gate) * up, or gelu's, of a product that holds both, gate first. A program takes BLOCK features of one token.

Shape suffixes: t tokens, i features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.activations import activated
from octavo.kernels.triton.handles import launch

BLOCK = 2048


@triton.jit
def gated_kernel(
    gate_up_ptr, out_ptr,
    DIM: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rounds the activation before the product, as `reference.gated` does."""
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    feature_i = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = feature_i < DIM
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate_i = tl.load(gate_up_ptr + token * (2 * DIM) + feature_i, mask=inside, other=0.0)
    up_i = tl.load(gate_up_ptr + token * (2 * DIM) + DIM + feature_i, mask=inside, other=0.0)
    active_i = activated(gate_i.to(tl.float32), ACTIVATION).to(gate_i.dtype)
    result_i = (active_i.to(tl.float32) * up_i.to(tl.float32)).to(gate_i.dtype)
    tl.store(out_ptr + token * DIM + feature_i, result_i, mask=inside)


def gated_silu(gate_up_t2i: Tensor, *, pdl: bool = False) -> Tensor:
    """As `kernels.reference.gated.gated_silu`; the product is contiguous."""
    return _gated(gate_up_t2i, "silu", pdl=pdl)


def gated_gelu(gate_up_t2i: Tensor, *, pdl: bool = False) -> Tensor:
    """As `kernels.reference.gated.gated_gelu`; the product is contiguous."""
    return _gated(gate_up_t2i, "gelu_tanh", pdl=pdl)


def _gated(gate_up_t2i: Tensor, activation: str, *, pdl: bool) -> Tensor:
    assert gate_up_t2i.is_contiguous()
    tokens, features = gate_up_t2i.shape[0], gate_up_t2i.shape[1] // 2
    out_ti = torch.empty(tokens, features, dtype=gate_up_t2i.dtype, device=gate_up_t2i.device)
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(features))
        blocks = triton.cdiv(features, block)
        constants = {"DIM": features, "BLOCKS": blocks, "BLOCK": block, "ACTIVATION": activation, "PDL": pdl}
        launch(gated_kernel, (tokens * blocks, 1, 1), (gate_up_t2i, out_ti), constants, num_warps=4, pdl=pdl)
    return out_ti
