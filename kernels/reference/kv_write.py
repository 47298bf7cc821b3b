"""Store a step's K and V in the paged cache.

Shape suffixes: t tokens, g KV heads, d head dim.
"""

from __future__ import annotations

from torch import Tensor


def write_kv(k_tgd: Tensor, v_tgd: Tensor, kv_cache: Tensor, slot_mapping_t: Tensor) -> None:
    """Write K and V of token t at block slot_mapping[t] // block_size, offset slot_mapping[t] % block_size, in place.

    kv_cache [num_blocks, 2, g, block_size, d]. Two tokens may name one place only in the null block (padding).
    """
    block_size = kv_cache.shape[3]
    block_t, offset_t = slot_mapping_t // block_size, slot_mapping_t % block_size
    kv_cache[:, 0][block_t, :, offset_t] = k_tgd
    kv_cache[:, 1][block_t, :, offset_t] = v_tgd
