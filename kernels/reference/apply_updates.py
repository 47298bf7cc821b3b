"""Bring block tables and caches up to date before a step: new table entries, and copies of shared blocks.

Shape suffixes: s slots, b blocks, u updates, c copies.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def apply_updates(
    block_table_sb: Tensor, block_update_u3: Tensor, kv_caches: Sequence[Tensor], block_copy_c2: Tensor
) -> None:
    """Set block_table[slot, index] = block for each update (slot, index, block), then copy each (source, destination)
    block in the cache of every layer, in place.

    No place is updated twice in a step, and no destination of a copy is the source or destination of another.
    """
    if block_update_u3.shape[0]:
        slot_u, index_u, block_u = block_update_u3.long().unbind(1)
        block_table_sb[slot_u, index_u] = block_u.to(block_table_sb.dtype)
    if block_copy_c2.shape[0]:
        source_c, destination_c = block_copy_c2.long().unbind(1)
        for cache in kv_caches:
            cache[destination_c] = cache[source_c]
