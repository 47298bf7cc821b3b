"""What lies between the qkv product and paged attention: norms of q and k heads, rotation, K and V into the cache.

Shape suffixes: t tokens, n heads (of q or of k), h query heads, g KV heads, d head dim, o features of the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.kv_write import write_kv
from octavo.kernels.reference.rms_norm import rms_norm


def rotate_write(
    qkv_to: Tensor,
    cos_sin_td: Tensor,
    kv_cache: Tensor,
    slot_mapping_t: Tensor,
    q_gain_d: Tensor | None,
    k_gain_d: Tensor | None,
    *,
    num_heads: int,
    norm_eps: float,
) -> Tensor:
    """Rotated q [t, h, d]; writes rotated k, and v, at `slot_mapping` (write_kv). No gains, no norms.

    cos_sin: cosines of half of the dims that are rotated, then sines, fp32. `qkv` is left as it is.
    """
    kv_heads, _, dim = kv_cache.shape[2:]
    q_thd, k_tgd, v_tgd = qkv_to.unflatten(-1, (-1, dim)).split((num_heads, kv_heads, kv_heads), dim=1)
    if q_gain_d is not None and k_gain_d is not None:
        q_thd, k_tgd = rms_norm(q_thd, q_gain_d, norm_eps), rms_norm(k_tgd, k_gain_d, norm_eps)
    write_kv(rotate(k_tgd, cos_sin_td), v_tgd, kv_cache, slot_mapping_t)
    return rotate(q_thd, cos_sin_td)


def rotate(x_tnd: Tensor, cos_sin_td: Tensor) -> Tensor:
    """Pairs dimension i of the first so many with the one half of them further, in fp32; x's dtype."""
    rotated = cos_sin_td.shape[1]
    cos, sin = cos_sin_td.unsqueeze(1).chunk(2, dim=-1)
    first, second = x_tnd[..., :rotated].float().chunk(2, dim=-1)
    pair = (first * cos - second * sin).to(x_tnd.dtype), (second * cos + first * sin).to(x_tnd.dtype)
    return torch.cat((*pair, x_tnd[..., rotated:]), dim=-1)
