"""Store a step's K and V in the paged cache.

Shape suffixes: t tokens, g KV heads, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.quantize_rows import FP8, LARGEST


def kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as a cache of the dtype holds them; what is larger than e4m3's largest is kept as that."""
    return x.float().clamp(-LARGEST, LARGEST).to(dtype) if dtype == FP8 else x.to(dtype)


def as_stored(cache: Tensor) -> Tensor:
    """The cache, seen as bytes where torch can't index its numbers."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def write_kv(k_tgd: Tensor, v_tgd: Tensor, kv_cache: Tensor, slot_mapping_t: Tensor) -> None:
    """Write K and V of token t at block slot_mapping[t] // block_size, offset slot_mapping[t] % block_size, in place.

    kv_cache [num_blocks, 2, g, block_size, d], of any dtype that `kept` knows; a cache without V has 1 in the place of
    the 2. Two tokens may name one place only in the null block (padding).
    """
    block_size = kv_cache.shape[3]
    block_t, offset_t = slot_mapping_t // block_size, slot_mapping_t % block_size
    stored = as_stored(kv_cache)
    stored[:, 0][block_t, :, offset_t] = as_stored(kept(k_tgd, kv_cache.dtype))
    if stored.shape[1] == 2:
        stored[:, 1][block_t, :, offset_t] = as_stored(kept(v_tgd, kv_cache.dtype))
