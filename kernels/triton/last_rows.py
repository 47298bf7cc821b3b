"""Bring what sampling reads of a step to fixed places, in one launch, so that a captured graph can follow any step.

Shape suffixes: t tokens, r rows of the step, s sampled rows, m model dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.last_rows import SampledInputs
from octavo.kernels.triton.handles import launch


@triton.jit(
    do_not_specialize=["count", "null_slot"],
    do_not_specialize_on_alignment=["start_ptr", "slot_ptr", "length_ptr", "count_ptr"],
)
def last_row_kernel(
    hidden_ptr, start_ptr, slot_ptr, length_ptr, count_ptr, out_hidden_ptr, out_slot_ptr, out_position_ptr,
    count, null_slot, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One sampled row. COUNTED: how many there are is on the device."""
    row = tl.program_id(0)
    if COUNTED:
        count = tl.load(count_ptr)
    is_real = row < count
    token = tl.load(start_ptr + row + 1, mask=is_real, other=1).to(tl.int64) - 1
    column_m = tl.arange(0, BLOCK)
    hidden_m = tl.load(hidden_ptr + token * WIDTH + column_m, mask=column_m < WIDTH)
    tl.store(out_hidden_ptr + row.to(tl.int64) * WIDTH + column_m, hidden_m, mask=column_m < WIDTH)
    tl.store(out_slot_ptr + row, tl.load(slot_ptr + row, mask=is_real, other=null_slot))
    tl.store(out_position_ptr + row, tl.load(length_ptr + row, mask=is_real, other=1))


def gather_last_rows(
    hidden_tm: Tensor,
    query_start_r: Tensor,
    slot_r: Tensor,
    kv_len_r: Tensor,
    out: SampledInputs,
    *,
    count: int | Tensor,
    null_slot: int,
) -> None:
    """As `kernels.reference.last_rows.gather_last_rows`; everything is contiguous."""
    is_counted = isinstance(count, Tensor)
    counter, number = (count, 0) if is_counted else (slot_r, count)
    size, width = out.hidden_sm.shape
    launch(
        last_row_kernel,
        (size, 1, 1),
        (hidden_tm, query_start_r, slot_r, kv_len_r, counter, *out, number, null_slot),
        {"WIDTH": width, "BLOCK": triton.next_power_of_2(width), "COUNTED": is_counted},
        num_warps=4,
    )
