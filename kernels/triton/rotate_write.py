"""What lies between the qkv product and paged attention: norms of q and k heads, rotation, K and V into the cache.

One program takes one token. Rotated q stays where it was in the product (attention reads it with the product's row
stride); k and v go to the cache only.

Shape suffixes: t tokens, h query heads, g KV heads (n: either, padded), d head dim (padded), f half of the rotated dims
(padded), r the dims after those (padded).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch


@triton.jit
def normed(x_nf, scale_n1, gain_1f):
    """x * scale * gain in fp32; rounds where layers/norm.py does."""
    wide_nf = x_nf.to(tl.float32) * scale_n1
    if gain_1f.dtype != tl.float32:
        wide_nf = wide_nf.to(x_nf.dtype).to(tl.float32)
    return (wide_nf * gain_1f.to(tl.float32)).to(x_nf.dtype).to(tl.float32)


@triton.jit
def rotate_heads(
    source_n1, target_n1, mask_n1, gain_ptr, cos_1f, sin_1f, eps,
    DIM: tl.constexpr, ROTATED: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads from one place to another, normed and their first ROTATED dims rotated; REST_PAD 0: that is all of them."""
    HALF: tl.constexpr = ROTATED // 2
    half_1f = tl.arange(0, HALF_PAD)[None, :]
    mask_nf = mask_n1 & (half_1f < HALF)
    first_nf = tl.load(source_n1 + half_1f, mask=mask_nf, other=0.0)
    second_nf = tl.load(source_n1 + HALF + half_1f, mask=mask_nf, other=0.0)
    low_nf, high_nf = first_nf.to(tl.float32), second_nf.to(tl.float32)
    squares_n = tl.sum(low_nf * low_nf, 1) + tl.sum(high_nf * high_nf, 1)
    if REST_PAD > 0:
        rest_1r = ROTATED + tl.arange(0, REST_PAD)[None, :]
        mask_nr = mask_n1 & (rest_1r < DIM)
        rest_nr = tl.load(source_n1 + rest_1r, mask=mask_nr, other=0.0)
        wide_nr = rest_nr.to(tl.float32)
        squares_n += tl.sum(wide_nr * wide_nr, 1)
    if NORM:
        scale_n1 = tl.rsqrt(squares_n / DIM + eps)[:, None]
        low_nf = normed(first_nf, scale_n1, tl.load(gain_ptr + half_1f, mask=half_1f < HALF, other=0.0))
        high_nf = normed(second_nf, scale_n1, tl.load(gain_ptr + HALF + half_1f, mask=half_1f < HALF, other=0.0))
        if REST_PAD > 0:
            wide_nr = normed(rest_nr, scale_n1, tl.load(gain_ptr + rest_1r, mask=rest_1r < DIM, other=0.0))
    dtype = target_n1.dtype.element_ty
    # In the product's type first, as a cache in another one would have it from there.
    first_to_nf = (low_nf * cos_1f - high_nf * sin_1f).to(first_nf.dtype)
    second_to_nf = (high_nf * cos_1f + low_nf * sin_1f).to(first_nf.dtype)
    tl.store(target_n1 + half_1f, first_to_nf.to(dtype), mask=mask_nf)
    tl.store(target_n1 + HALF + half_1f, second_to_nf.to(dtype), mask=mask_nf)
    if REST_PAD > 0:
        tl.store(target_n1 + rest_1r, wide_nr.to(rest_nr.dtype).to(dtype), mask=mask_nr)


@triton.jit
def rotate_write_kernel(
    qkv_ptr, cos_sin_ptr, place_ptr, q_gain_ptr, k_gain_ptr, cache_ptr, eps,
    QKV_STRIDE: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, KV_HEADS: tl.constexpr,
    KV_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROTATED: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_STRIDE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    HALF: tl.constexpr = ROTATED // 2
    half_1f = tl.arange(0, HALF_PAD)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(place_ptr + token)
    cos_1f = tl.load(cos_sin_ptr + token * ROTATED + half_1f, mask=half_1f < HALF, other=0.0)
    sin_1f = tl.load(cos_sin_ptr + token * ROTATED + HALF + half_1f, mask=half_1f < HALF, other=0.0)
    head_h1 = tl.arange(0, HEADS_PAD)[:, None]
    row_ptr = qkv_ptr + token * QKV_STRIDE
    q_h1 = row_ptr + head_h1 * DIM
    rotate_heads(q_h1, q_h1, head_h1 < HEADS, q_gain_ptr, cos_1f, sin_1f, eps, DIM, ROTATED, HALF_PAD, REST_PAD, NORM)
    head_g1 = tl.arange(0, KV_PAD)[:, None]
    k_g1 = row_ptr + (HEADS + head_g1) * DIM
    key_g1 = cache_ptr + (place // BLOCK) * BLOCK_STRIDE + (place % BLOCK) * DIM + head_g1 * (BLOCK * DIM)
    rotate_heads(
        k_g1, key_g1, head_g1 < KV_HEADS, k_gain_ptr, cos_1f, sin_1f, eps, DIM, ROTATED, HALF_PAD, REST_PAD, NORM
    )
    dim_1d = tl.arange(0, DIM_PAD)[None, :]
    mask_gd = (head_g1 < KV_HEADS) & (dim_1d < DIM)
    v_gd = tl.load(k_g1 + KV_HEADS * DIM + dim_1d, mask=mask_gd)
    tl.store(key_g1 + KV_HEADS * BLOCK * DIM + dim_1d, v_gd.to(cache_ptr.dtype.element_ty), mask=mask_gd)


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

    A token's features are dense in qkv, a block's numbers in the cache.
    """
    kv_heads, block_size, dim = kv_cache.shape[2:]
    tokens, width = qkv_to.shape
    rotated = cos_sin_td.shape[1]
    assert qkv_to.stride(1) == 1
    assert cos_sin_td.is_contiguous()
    assert width == (num_heads + 2 * kv_heads) * dim
    assert slot_mapping_t.shape[0] == tokens == cos_sin_td.shape[0]
    constants = {
        "QKV_STRIDE": qkv_to.stride(0),
        "HEADS": num_heads,
        "HEADS_PAD": triton.next_power_of_2(num_heads),
        "KV_HEADS": kv_heads,
        "KV_PAD": triton.next_power_of_2(kv_heads),
        "DIM": dim,
        "DIM_PAD": triton.next_power_of_2(dim),
        "ROTATED": rotated,
        "HALF_PAD": triton.next_power_of_2(rotated // 2),
        "REST_PAD": triton.next_power_of_2(dim - rotated) if rotated < dim else 0,
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
    return qkv_to.as_strided((tokens, num_heads, dim), (qkv_to.stride(0), dim, 1))
