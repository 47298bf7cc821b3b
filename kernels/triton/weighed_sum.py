"""What joins a mixture of experts and the MLP beside it, which a sigmoid weighs: one program a token.

Shape suffixes: t tokens, m model dim (padded).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch


@triton.jit
def weighed_sum_kernel(
    hidden_ptr, gate_ptr, shared_ptr, sparse_ptr, out_ptr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All of one token."""
    dim_m = tl.arange(0, DIM_PAD)
    inside = dim_m < DIM
    gate_m = tl.load(gate_ptr + dim_m, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place_m = tl.program_id(0).to(tl.int64) * DIM + dim_m
    hidden_m = tl.load(hidden_ptr + place_m, mask=inside, other=0.0).to(tl.float32)
    shared_m = tl.load(shared_ptr + place_m, mask=inside, other=0.0).to(tl.float32)
    sparse_m = tl.load(sparse_ptr + place_m, mask=inside, other=0.0).to(tl.float32)
    weight = 1.0 / (1.0 + tl.exp(-tl.sum(hidden_m * gate_m, 0)))
    tl.store(out_ptr + place_m, (sparse_m + weight * shared_m).to(out_ptr.dtype.element_ty), mask=inside)


def weighed_sum(
    hidden_tm: Tensor, gate_1m: Tensor, shared_tm: Tensor, sparse_tm: Tensor, *, pdl: bool = False
) -> Tensor:
    """As `kernels.reference.weighed_sum.weighed_sum`; all are contiguous."""
    tokens, dim = sparse_tm.shape
    assert hidden_tm.is_contiguous()
    assert shared_tm.is_contiguous()
    assert sparse_tm.is_contiguous()
    out_tm = torch.empty_like(sparse_tm)
    if tokens:
        constants = {"DIM": dim, "DIM_PAD": triton.next_power_of_2(dim), "PDL": pdl}
        args = (hidden_tm, gate_1m, shared_tm, sparse_tm, out_tm)
        launch(weighed_sum_kernel, (tokens, 1, 1), args, constants, num_warps=8 if dim > 2048 else 4, pdl=pdl)
    return out_tm
