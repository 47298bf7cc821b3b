"""Turn a step's arena into what the model reads, in one launch: token ids, positions, places in the cache.

Shape suffixes: t tokens, r rows, g cache groups, s slots, b blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.prepare import PreparedTokens
from octavo.kernels.triton.handles import launch, only_compiling

TOKENS = 128
"""Tokens of a program."""

OUTPUTS = ["out_token_ptr", "out_position_ptr", "out_place_ptr"]
ARRAYS = ["token_ptr", "position_ptr", "slot_ptr", "start_ptr", "last_ptr", *OUTPUTS]


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "group_stride", "table_stride", "place_stride"],
    do_not_specialize_on_alignment=ARRAYS,
)
def prepare_kernel(
    token_ptr, position_ptr, slot_ptr, start_ptr, table_ptr, last_ptr, out_token_ptr, out_position_ptr, out_place_ptr,
    num_tokens, num_rows, group_stride, table_stride, place_stride,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens in one cache group; 2^STEPS exceeds the number of rows that there can be."""
    group = tl.program_id(1).to(tl.int64)
    token_t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists_t = token_t < num_tokens
    # Rows whose start is at most the token, less one, is its row: binary search for that number.
    low_t = tl.zeros([TOKENS], tl.int32)
    high_t = low_t + num_rows
    for _ in range(STEPS):
        middle_t = (low_t + high_t) // 2
        open_t = low_t < high_t
        end_t = tl.load(start_ptr + 1 + middle_t, mask=open_t, other=0)
        low_t = tl.where(open_t & (end_t <= token_t), middle_t + 1, low_t)
        high_t = tl.where(open_t & (end_t > token_t), middle_t, high_t)
    real_t = exists_t & (low_t < num_rows)
    slot_t = tl.load(slot_ptr + low_t, mask=real_t, other=0)
    given_t = tl.load(token_ptr + token_t, mask=real_t, other=0).to(tl.int64)
    last_t = tl.load(last_ptr + slot_t, mask=real_t & (given_t < 0), other=0).to(tl.int64)
    position_t = tl.load(position_ptr + token_t, mask=real_t, other=0).to(tl.int64)
    row_t = table_ptr + group * group_stride + slot_t.to(tl.int64) * table_stride
    block_t = tl.load(row_t + position_t // BLOCK, mask=real_t, other=0)
    place_t = tl.where(real_t, block_t.to(tl.int64) * BLOCK + position_t % BLOCK, 0)
    is_first = group == 0
    tl.store(out_token_ptr + token_t, tl.where(given_t < 0, last_t, given_t), mask=exists_t & is_first)
    tl.store(out_position_ptr + token_t, position_t, mask=exists_t & is_first)
    tl.store(out_place_ptr + group * place_stride + token_t, place_t, mask=exists_t)


def prepare_step(
    token_id_t: Tensor,
    position_t: Tensor,
    row_slot_r: Tensor,
    query_start_r: Tensor,
    block_table_gsb: Tensor,
    last_token_s: Tensor,
    *,
    block_size: int,
) -> PreparedTokens:
    """As `kernels.reference.prepare.prepare_step`; arrays are contiguous."""
    num_tokens, num_rows = token_id_t.shape[0], row_slot_r.shape[0]
    # While kernels are only compiled nobody fills it, but torch's own kernels read it: ids and positions must exist.
    make = torch.zeros if only_compiling() else torch.empty
    num_groups, num_slots, _ = block_table_gsb.shape
    # Rows of an even length: all begin at multiples of 16 bytes, as kernels were compiled for.
    made = make(2 + num_groups, num_tokens + num_tokens % 2, dtype=torch.int64, device=token_id_t.device)
    made = made[:, :num_tokens]
    out = made[0], made[1], made[2:]
    if num_tokens:
        arrays = (token_id_t, position_t, row_slot_r, query_start_r, block_table_gsb, last_token_s, *out)
        steps = num_slots.bit_length()  # every row has a slot
        launch(
            prepare_kernel,
            (triton.cdiv(num_tokens, TOKENS), num_groups, 1),
            (*arrays, num_tokens, num_rows, *block_table_gsb.stride()[:2], made.stride(0)),
            {"BLOCK": block_size, "STEPS": steps, "TOKENS": TOKENS},
            num_warps=4,
        )
    return PreparedTokens(*out)
