"""Uniform numbers from a counter in one launch: Philox 4x32-10, keyed by a slot's seed.

Shape suffixes: s slots, r rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128
"""Rows of a program."""


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slot_ptr", "position_ptr"])
def uniform_kernel(seed_ptr, index_ptr, slot_ptr, position_ptr, out_ptr, num_rows, ROWS: tl.constexpr):
    """ROWS rows."""
    row_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask_r = row_r < num_rows
    slot_r = tl.load(slot_ptr + row_r, mask=mask_r, other=0)
    seed_r = tl.load(seed_ptr + slot_r, mask=mask_r, other=0)
    index_r = tl.load(index_ptr + slot_r, mask=mask_r, other=0).to(tl.uint32)
    position_r = tl.load(position_ptr + row_r, mask=mask_r, other=0).to(tl.uint32)
    zero_r = tl.zeros([ROWS], tl.uint32)
    first_r, second_r, _, _ = tl.philox(seed_r, position_r, index_r, zero_r, zero_r, n_rounds=10)
    bits_r = (first_r.to(tl.int64) << 21) + (second_r >> 11).to(tl.int64)
    tl.store(out_ptr + row_r, bits_r.to(tl.float64) * 1.1102230246251565e-16, mask=mask_r)  # 2^-53, exact in fp32 too


def uniform(seed_s: Tensor, index_s: Tensor, slot_r: Tensor, position_r: Tensor) -> Tensor:
    """As `kernels.reference.uniform.uniform`; arrays are contiguous."""
    num_rows = slot_r.shape[0]
    out_r = torch.empty(num_rows, dtype=torch.float64, device=slot_r.device)
    if num_rows:
        grid = (triton.cdiv(num_rows, ROWS),)
        uniform_kernel[grid](seed_s, index_s, slot_r, position_r, out_r, num_rows, ROWS=ROWS, num_warps=4)
    return out_r
