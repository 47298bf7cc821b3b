"""What lies between the products of latent attention and its paged attention: the norm of latents, the rotation of keys
and queries, latents and rotated keys into the cache.

Shape suffixes: t tokens, h heads, r rotated dims of a head, l latent dim, d = l + r.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.kv_write import write_kv
from octavo.kernels.reference.rms_norm import rms_norm


def latent_write(
    query_thr: Tensor,
    latent_tl: Tensor,
    key_tr: Tensor,
    cos_sin_tr: Tensor,
    gain_l: Tensor,
    kv_cache: Tensor,
    slot_mapping_t: Tensor,
    q_thd: Tensor,
    *,
    eps: float,
    is_interleaved: bool,
) -> None:
    """Write the rotated part of each query behind its place for l dims in `q_thd`, and [normed latent | rotated key] of
    each token at `slot_mapping` of the cache [num_blocks, 1, 1, block_size, d] (write_kv).

    cos_sin: cosines of half the dims, then sines, fp32. Dims i and i + r / 2 are rotated together, or neighbours.
    """
    latent_dim = latent_tl.shape[1]
    q_thd[..., latent_dim:] = rotate(query_thr, cos_sin_tr, is_interleaved)
    key_t1r = rotate(key_tr.unsqueeze(1), cos_sin_tr, is_interleaved)
    k_t1d = torch.cat((rms_norm(latent_tl, gain_l, eps).unsqueeze(1), key_t1r), dim=-1)
    write_kv(k_t1d, k_t1d, kv_cache, slot_mapping_t)


def rotate(x_tnr: Tensor, cos_sin_tr: Tensor, is_interleaved: bool) -> Tensor:
    """In fp32; x's dtype."""
    cos, sin = cos_sin_tr.unsqueeze(1).chunk(2, dim=-1)
    wide = x_tnr.float()
    first, second = (wide[..., ::2], wide[..., 1::2]) if is_interleaved else wide.chunk(2, dim=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    return (torch.stack(pair, dim=-1).flatten(-2) if is_interleaved else torch.cat(pair, dim=-1)).to(x_tnr.dtype)
