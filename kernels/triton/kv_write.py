"""Store a step's K and V in the paged cache: one program a token.

Shape suffixes: t tokens, g KV heads (padded), d head dim (padded).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch


@triton.jit
def write_kernel(
    k_ptr, v_ptr, cache_ptr, place_ptr,
    KV_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    token = tl.program_id(0)
    place = tl.load(place_ptr + token)
    head_g = tl.arange(0, HEADS_PAD)[:, None]
    dim_d = tl.arange(0, DIM_PAD)[None, :]
    mask = (head_g < KV_HEADS) & (dim_d < DIM)
    source = head_g * DIM + dim_d
    k_gd = tl.load(k_ptr + token.to(tl.int64) * K_STRIDE + source, mask=mask)
    target = cache_ptr + (place // BLOCK) * BLOCK_STRIDE + (head_g * BLOCK + place % BLOCK) * DIM + dim_d
    tl.store(target, k_gd.to(cache_ptr.dtype.element_ty), mask=mask)
    if HAS_V:
        v_gd = tl.load(v_ptr + token.to(tl.int64) * V_STRIDE + source, mask=mask)
        tl.store(target + KV_HEADS * BLOCK * DIM, v_gd.to(cache_ptr.dtype.element_ty), mask=mask)


def write_kv(k_tgd: Tensor, v_tgd: Tensor, kv_cache: Tensor, slot_mapping_t: Tensor) -> None:
    """As `kernels.reference.kv_write.write_kv`. A token's heads are dense in k and v; the cache is contiguous."""
    kv_heads, block_size, head_dim = kv_cache.shape[2:]
    constants = {
        "KV_HEADS": kv_heads,
        "HEADS_PAD": triton.next_power_of_2(kv_heads),
        "DIM": head_dim,
        "DIM_PAD": triton.next_power_of_2(head_dim),
        "BLOCK": block_size,
        "K_STRIDE": k_tgd.stride(0),
        "V_STRIDE": v_tgd.stride(0),
        "BLOCK_STRIDE": kv_cache.stride(0),
        "HAS_V": kv_cache.shape[1] == 2,
    }
    tokens = slot_mapping_t.shape[0]
    if tokens:
        launch(write_kernel, (tokens, 1, 1), (k_tgd, v_tgd, kv_cache, slot_mapping_t), constants, num_warps=4)
