"""What lies between the qkv product and paged attention: norms of q and k heads, rotation, K and V into the cache.

One program takes one token. Rotated q stays where it was in the product (attention reads it with the product's row
stride); k and v go to the cache only.

Shape suffixes: t tokens, h query heads, g KV heads (n: either, padded), d head dim, f half of it (padded).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch


@triton.jit
def rotated(first_nf, second_nf, gain_ptr, half_f, inside, cos_f, sin_f, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """Both halves of heads, fp32, normed and rotated; rounds where layers/norm.py does."""
    dtype = first_nf.dtype
    first_nf, second_nf = first_nf.to(tl.float32), second_nf.to(tl.float32)
    if NORM:
        squares_n = tl.sum(first_nf * first_nf, 1) + tl.sum(second_nf * second_nf, 1)
        scale_n1 = tl.rsqrt(squares_n / DIM + eps)[:, None]
        low_f = tl.load(gain_ptr + half_f, mask=inside, other=0.0)
        high_f = tl.load(gain_ptr + DIM // 2 + half_f, mask=inside, other=0.0)
        first_nf, second_nf = first_nf * scale_n1, second_nf * scale_n1
        if low_f.dtype != tl.float32:
            first_nf, second_nf = first_nf.to(dtype).to(tl.float32), second_nf.to(dtype).to(tl.float32)
        first_nf = (first_nf * low_f.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
        second_nf = (second_nf * high_f.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    cos_1f, sin_1f = cos_f[None, :], sin_f[None, :]
    return first_nf * cos_1f - second_nf * sin_1f, second_nf * cos_1f + first_nf * sin_1f


@triton.jit
def rotate_write_kernel(
    qkv_ptr, cos_sin_ptr, place_ptr, q_gain_ptr, k_gain_ptr, cache_ptr, eps,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, KV_HEADS: tl.constexpr, KV_PAD: tl.constexpr,
    DIM: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    HALF: tl.constexpr = DIM // 2
    half_f = tl.arange(0, HALF_PAD)
    inside = half_f < HALF
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(place_ptr + token)
    cos_f = tl.load(cos_sin_ptr + token * DIM + half_f, mask=inside, other=0.0)
    sin_f = tl.load(cos_sin_ptr + token * DIM + HALF + half_f, mask=inside, other=0.0)
    row_ptr = qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * DIM)

    head_h = tl.arange(0, HEADS_PAD)
    q_hf = row_ptr + head_h[:, None] * DIM + half_f[None, :]
    mask_hf = (head_h < HEADS)[:, None] & inside[None, :]
    first_hf = tl.load(q_hf, mask=mask_hf, other=0.0)
    second_hf = tl.load(q_hf + HALF, mask=mask_hf, other=0.0)
    low_hf, high_hf = rotated(first_hf, second_hf, q_gain_ptr, half_f, inside, cos_f, sin_f, eps, DIM, NORM)
    tl.store(q_hf, low_hf.to(first_hf.dtype), mask=mask_hf)
    tl.store(q_hf + HALF, high_hf.to(first_hf.dtype), mask=mask_hf)

    head_g = tl.arange(0, KV_PAD)
    mask_gf = (head_g < KV_HEADS)[:, None] & inside[None, :]
    k_gf = row_ptr + HEADS * DIM + head_g[:, None] * DIM + half_f[None, :]
    first_gf = tl.load(k_gf, mask=mask_gf, other=0.0)
    second_gf = tl.load(k_gf + HALF, mask=mask_gf, other=0.0)
    low_gf, high_gf = rotated(first_gf, second_gf, k_gain_ptr, half_f, inside, cos_f, sin_f, eps, DIM, NORM)
    v_gf = k_gf + KV_HEADS * DIM
    key_ptr = cache_ptr + (place // BLOCK) * BLOCK_STRIDE + (place % BLOCK) * DIM
    key_gf = key_ptr + head_g[:, None] * (BLOCK * DIM) + half_f[None, :]
    tl.store(key_gf, low_gf.to(cache_ptr.dtype.element_ty), mask=mask_gf)
    tl.store(key_gf + HALF, high_gf.to(cache_ptr.dtype.element_ty), mask=mask_gf)
    value_gf = key_gf + KV_HEADS * BLOCK * DIM
    tl.store(value_gf, tl.load(v_gf, mask=mask_gf).to(cache_ptr.dtype.element_ty), mask=mask_gf)
    tl.store(value_gf + HALF, tl.load(v_gf + HALF, mask=mask_gf).to(cache_ptr.dtype.element_ty), mask=mask_gf)


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
    pdl: bool = False,
) -> Tensor:
    """As `kernels.reference.rotate_write.rotate_write`, but q [t, h, d] is a view of `qkv`, which is overwritten.

    qkv and the cache are contiguous.
    """
    kv_heads, block_size, dim = kv_cache.shape[2:]
    tokens, width = qkv_to.shape
    assert qkv_to.is_contiguous()
    assert width == (num_heads + 2 * kv_heads) * dim
    assert slot_mapping_t.shape[0] == tokens == cos_sin_td.shape[0]
    constants = {
        "HEADS": num_heads,
        "HEADS_PAD": triton.next_power_of_2(num_heads),
        "KV_HEADS": kv_heads,
        "KV_PAD": triton.next_power_of_2(kv_heads),
        "DIM": dim,
        "HALF_PAD": triton.next_power_of_2(dim // 2),
        "BLOCK": block_size,
        "BLOCK_STRIDE": kv_cache.stride(0),
        "NORM": q_gain_d is not None,
        "PDL": pdl,
    }
    if q_gain_d is None or k_gain_d is None:
        q_gain_d = k_gain_d = qkv_to  # not read
    if tokens:
        args = (qkv_to, cos_sin_td, slot_mapping_t, q_gain_d, k_gain_d, kv_cache, norm_eps)
        launch(rotate_write_kernel, (tokens, 1, 1), args, constants, num_warps=4, pdl=pdl)
    return qkv_to.as_strided((tokens, num_heads, dim), (width, dim, 1))
