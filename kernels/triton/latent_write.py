"""What lies between the products of latent attention and its paged attention, in one launch: the norm of latents, the
rotation of keys and queries, latents and rotated keys into the cache. One program takes one token.

Shape suffixes: t tokens, h heads (padded), r rotated dims of a head, f half of them (padded), l latent dim (padded),
d = l + r.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch


@triton.jit
def latent_write_kernel(
    query_ptr, latent_ptr, key_ptr, cos_sin_ptr, place_ptr, gain_ptr, cache_ptr, q_ptr, eps,
    QUERY_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, LATENT_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROTATED: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    DIM: tl.constexpr = LATENT + ROTATED
    HALF: tl.constexpr = ROTATED // 2
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(place_ptr + token)
    slot_ptr = cache_ptr + (place // BLOCK) * BLOCK_STRIDE + (place % BLOCK) * DIM

    latent_l = tl.arange(0, LATENT_PAD)
    in_latent = latent_l < LATENT
    x_l = tl.load(latent_ptr + token * LATENT_STRIDE + latent_l, mask=in_latent, other=0.0)
    dtype = x_l.dtype
    wide_l = x_l.to(tl.float32)
    normed_l = wide_l * tl.rsqrt(tl.sum(wide_l * wide_l, 0) / LATENT + eps)
    gain_l = tl.load(gain_ptr + latent_l, mask=in_latent, other=0.0)
    normed_l = (normed_l.to(dtype).to(tl.float32) * gain_l.to(tl.float32)).to(dtype)
    tl.store(slot_ptr + latent_l, normed_l.to(cache_ptr.dtype.element_ty), mask=in_latent)

    half_f = tl.arange(0, HALF_PAD)
    in_half = half_f < HALF
    cos_f = tl.load(cos_sin_ptr + token * ROTATED + half_f, mask=in_half, other=0.0)
    sin_f = tl.load(cos_sin_ptr + token * ROTATED + HALF + half_f, mask=in_half, other=0.0)
    if INTERLEAVED:
        first_f = 2 * half_f
        second_f = 2 * half_f + 1
    else:
        first_f = half_f
        second_f = HALF + half_f
    a_f = tl.load(key_ptr + token * KEY_STRIDE + first_f, mask=in_half, other=0.0).to(tl.float32)
    b_f = tl.load(key_ptr + token * KEY_STRIDE + second_f, mask=in_half, other=0.0).to(tl.float32)
    key_a = (a_f * cos_f - b_f * sin_f).to(dtype).to(cache_ptr.dtype.element_ty)
    key_b = (b_f * cos_f + a_f * sin_f).to(dtype).to(cache_ptr.dtype.element_ty)
    tl.store(slot_ptr + LATENT + first_f, key_a, mask=in_half)
    tl.store(slot_ptr + LATENT + second_f, key_b, mask=in_half)

    head_h = tl.arange(0, HEADS_PAD)
    mask_hf = (head_h < HEADS)[:, None] & in_half[None, :]
    query_h1 = query_ptr + token * QUERY_STRIDE + head_h[:, None] * HEAD_STRIDE
    a_hf = tl.load(query_h1 + first_f[None, :], mask=mask_hf, other=0.0).to(tl.float32)
    b_hf = tl.load(query_h1 + second_f[None, :], mask=mask_hf, other=0.0).to(tl.float32)
    q_h1 = q_ptr + (token * HEADS + head_h[:, None]) * DIM + LATENT
    tl.store(q_h1 + first_f[None, :], (a_hf * cos_f[None, :] - b_hf * sin_f[None, :]).to(dtype), mask=mask_hf)
    tl.store(q_h1 + second_f[None, :], (b_hf * cos_f[None, :] + a_hf * sin_f[None, :]).to(dtype), mask=mask_hf)


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
    pdl: bool = False,
) -> None:
    """As `kernels.reference.latent_write.latent_write`. The last dims of all are dense; q and the cache are contiguous,
    the others may be slices of products."""
    tokens, heads, rotated = query_thr.shape
    latent_dim = latent_tl.shape[1]
    assert q_thd.is_contiguous()
    assert query_thr.stride(2) == latent_tl.stride(1) == key_tr.stride(1) == cos_sin_tr.stride(1) == 1
    constants = {
        "QUERY_STRIDE": query_thr.stride(0),
        "HEAD_STRIDE": query_thr.stride(1),
        "LATENT_STRIDE": latent_tl.stride(0),
        "KEY_STRIDE": key_tr.stride(0),
        "HEADS": heads,
        "HEADS_PAD": triton.next_power_of_2(heads),
        "LATENT": latent_dim,
        "LATENT_PAD": triton.next_power_of_2(latent_dim),
        "ROTATED": rotated,
        "HALF_PAD": triton.next_power_of_2(rotated // 2),
        "BLOCK": kv_cache.shape[3],
        "BLOCK_STRIDE": kv_cache.stride(0),
        "INTERLEAVED": is_interleaved,
        "PDL": pdl,
    }
    if tokens:
        args = (query_thr, latent_tl, key_tr, cos_sin_tr, slot_mapping_t, gain_l, kv_cache, q_thd, eps)
        launch(latent_write_kernel, (tokens, 1, 1), args, constants, num_warps=4, pdl=pdl)
