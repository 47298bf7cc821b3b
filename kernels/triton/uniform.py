"""Uniform numbers from a counter in one launch: Philox 4x32-10, keyed by a slot's seed.

Shape suffixes: s slots, r rows, c columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 256
"""Columns of a program."""


@triton.jit(do_not_specialize=["num_columns"], do_not_specialize_on_alignment=["slot_ptr", "position_ptr"])
def uniform_kernel(seed_ptr, index_ptr, slot_ptr, position_ptr, out_ptr, num_columns, COLUMNS: tl.constexpr):
    """COLUMNS columns of a row."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    column_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    zero_c = tl.zeros([COLUMNS], tl.uint32)
    position_c = zero_c + tl.load(position_ptr + row).to(tl.uint32)
    index_c = zero_c + tl.load(index_ptr + slot).to(tl.uint32)
    seed = tl.load(seed_ptr + slot)
    first_c, second_c, _, _ = tl.philox(seed, position_c, index_c, column_c.to(tl.uint32), zero_c, n_rounds=10)
    bits_c = (first_c.to(tl.int64) << 21) + (second_c >> 11).to(tl.int64)
    uniform_c = bits_c.to(tl.float64) * 1.1102230246251565e-16  # 2^-53, exact in fp32 too
    tl.store(out_ptr + row.to(tl.int64) * num_columns + column_c, uniform_c, mask=column_c < num_columns)


def uniform(seed_s: Tensor, index_s: Tensor, slot_r: Tensor, position_r: Tensor, num_columns: int) -> Tensor:
    """As `kernels.reference.uniform.uniform`; arrays are contiguous."""
    num_rows = slot_r.shape[0]
    out_rc = torch.empty(num_rows, num_columns, dtype=torch.float64, device=slot_r.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(num_columns, COLUMNS))
        uniform_kernel[grid](seed_s, index_s, slot_r, position_r, out_rc, num_columns, COLUMNS=COLUMNS, num_warps=4)
    return out_rc
