"""Norm of q and k heads, rotation, KV write and paged attention of decode rows, from the qkv product.

Shape suffixes: r rows, s slots, b blocks, h query heads, g KV heads, d head dim, o the qkv product's features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.kv_write import write_kv
from octavo.kernels.reference.paged_attention import paged_attention
from octavo.kernels.reference.skinny_linear import rms_norm


def attend(
    qkv_ro: Tensor,
    kv_cache: Tensor,
    block_table_sb: Tensor,
    row_slot_r: Tensor,
    kv_len_r: Tensor,
    rotary_table: Tensor,
    q_gain_d: Tensor | None,
    k_gain_d: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    norm_eps: float,
    sink_h: Tensor | None = None,
) -> Tensor:
    """Output [r, h, d] in qkv's dtype; writes K and V of every row at position kv_len - 1 of `kv_cache`
    [blocks, 2, g, block size, d].
    """
    block_size, dim = kv_cache.shape[3:]
    q_rhd, k_rgd, v_rgd = qkv_ro.unflatten(-1, (-1, dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    position_r = kv_len_r.long() - 1
    q_rhd, k_rgd = (
        _rotate(x_rnd.float() if gain_d is None else rms_norm(x_rnd, gain_d, norm_eps), rotary_table[position_r])
        for x_rnd, gain_d in ((q_rhd, q_gain_d), (k_rgd, k_gain_d))
    )
    block_r = block_table_sb[row_slot_r.long(), position_r // block_size].long()
    write_kv(k_rgd, v_rgd, kv_cache, block_r * block_size + position_r % block_size)
    rows = kv_len_r.shape[0]
    return paged_attention(
        q_rhd.to(qkv_ro.dtype),
        kv_cache,
        block_table_sb,
        row_slot_r,
        torch.arange(rows + 1, dtype=torch.int32, device=qkv_ro.device),
        kv_len_r,
        num_rows=rows,
        scale=scale,
        window=window,
        soft_cap=0.0,
        sink_h=sink_h,
    )


def _rotate(x_rnd: Tensor, cos_sin_rd: Tensor) -> Tensor:
    """Rotate every head by its row's angles (cosines of half the dims, then sines)."""
    cos, sin = cos_sin_rd.unsqueeze(1).chunk(2, dim=-1)
    first, second = x_rnd.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
