"""Bring block tables and caches up to date before a step: new table entries, and copies of shared blocks.

Shape suffixes: s slots, b blocks, u updates, c copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch

UPDATES = 256
"""Updates of a program."""
WORDS = 1024
"""32-bit words that a program copies."""


@triton.jit(do_not_specialize=["num_updates", "table_stride"], do_not_specialize_on_alignment=["update_ptr"])
def update_kernel(table_ptr, update_ptr, num_updates, table_stride, UPDATES: tl.constexpr):
    """UPDATES entries (slot, index, block) of the table."""
    update_u = tl.program_id(0) * UPDATES + tl.arange(0, UPDATES)
    mask_u = update_u < num_updates
    slot_u = tl.load(update_ptr + update_u * 3, mask=mask_u, other=0)
    index_u = tl.load(update_ptr + update_u * 3 + 1, mask=mask_u, other=0)
    block_u = tl.load(update_ptr + update_u * 3 + 2, mask=mask_u, other=0)
    tl.store(table_ptr + slot_u.to(tl.int64) * table_stride + index_u, block_u, mask=mask_u)


@triton.jit(do_not_specialize=["block_words"], do_not_specialize_on_alignment=["copy_ptr"])
def copy_kernel(cache_ptr, copy_ptr, block_words, WORDS: tl.constexpr):
    """WORDS words of one block of one layer's cache, seen as 32-bit words."""
    copy = tl.program_id(0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    source = tl.load(copy_ptr + copy * 2).to(tl.int64)
    destination = tl.load(copy_ptr + copy * 2 + 1).to(tl.int64)
    value = tl.load(cache_ptr + source * block_words + word, mask=word < block_words)
    tl.store(cache_ptr + destination * block_words + word, value, mask=word < block_words)


def apply_updates(
    block_table_sb: Tensor, block_update_u3: Tensor, kv_caches: Sequence[Tensor], block_copy_c2: Tensor
) -> None:
    """As `kernels.reference.apply_updates.apply_updates`; arrays are contiguous int32."""
    updates, copies = block_update_u3.shape[0], block_copy_c2.shape[0]
    if updates:
        launch(
            update_kernel,
            (triton.cdiv(updates, UPDATES), 1, 1),
            (block_table_sb, block_update_u3, updates, block_table_sb.stride(0)),
            {"UPDATES": UPDATES},
            num_warps=4,
        )
    if copies:
        for cache in kv_caches:
            words = cache.flatten(1).view(torch.int32)
            count = words.shape[1]
            grid = (copies, triton.cdiv(count, WORDS), 1)
            launch(copy_kernel, grid, (words, block_copy_c2, count), {"WORDS": WORDS}, num_warps=4)
