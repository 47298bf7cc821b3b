"""Paged attention of decode steps (one token a row) with what is around it: norm of q and k heads, rotation, KV write.

A program takes one KV head of one row, and one of SPLITS shares of its blocks; grid (KV head, row, split). It reads the
row's length on the device, so the grid is fixed and a captured step serves any lengths: a row has at most SPLITS equal
shares, of about as many blocks at least as fill the device evenly (`least_share`); programs without a share end at
once, and a row that needs only one writes its output directly. Otherwise `reduce_kernel` joins the shares. The newest
token's K and V come from the qkv product, not from the cache: the program with the row's last block writes them and
adds them by hand.

PARTS > 0: `shared_attention.py` has run, and seen the blocks that rows share; those rows' shares are of the blocks
after them, and the program with a row's first share begins with what was found.

Needs blocks of TILE tokens, read whole by the tensor memory accelerator. What a block holds past a row's end is masked
by probability 0, so the cache must hold finite numbers everywhere (it is zeroed once). Not for prompts. Not here: how a
step is split and launched (decode_attention_launches.py).

Shape suffixes: r rows, s slots, b blocks, g query heads of a KV head (GROUP, padded to GROUP_P2), d head dim, t the
tokens of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.paging import for_products
from octavo.kernels.triton.shared_attention import load_parts, shared_tiles

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def rotate(first, second, cos, sin):
    """x * cos + rotate_half(x) * sin, given x and x with its halves swapped (sin has the sign)."""
    return first * cos + second * sin


@triton.jit
def least_share(
    kv_len_r, num_rows, MIN_TILES: tl.constexpr, COUNTED: tl.constexpr, TARGET: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Tiles of a share: MIN_TILES; if COUNTED (rows that are looked at) not more shares a KV head than TARGET."""
    least = MIN_TILES
    if COUNTED > 0:
        r = tl.arange(0, COUNTED)
        length_r = tl.load(kv_len_r + r, mask=r < num_rows, other=0)
        if WINDOW > 0:
            length_r = tl.minimum(length_r, WINDOW)
        total = tl.sum((length_r + TILE - 1) // TILE, 0)
        looked_at = tl.minimum(num_rows, COUNTED)
        least = tl.maximum(MIN_TILES, tl.cdiv(total * num_rows, TARGET * looked_at))
    return least


@triton.jit
def share(length, first, split, least, SPLITS: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """(first tile, end tile, end tile of the row, shares of the row) of a split of a row with `length` tokens, of which
    those before tile `first` have been seen; `least` tiles are one share's, half as many more still are."""
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE
    end = tl.cdiv(length, TILE)
    count = tl.minimum(tl.maximum((2 * (end - first) + least) // (2 * least), 1), SPLITS)
    size = tl.maximum(tl.cdiv(end - first, count), 1)
    low = first + split * size
    return low, tl.minimum(low + size, end), end, tl.cdiv(end - first, size)


@triton.jit
def attention_kernel(
    qkv,
    k_desc,
    v_desc,
    kv_cache,
    block_table_sb,
    row_slot_r,
    kv_len_r,
    shared_2,
    rotary_table,
    q_gain_d,
    k_gain_d,
    sink_h,
    out,
    split_acc,
    split_max,
    split_sum,
    shared_acc,
    shared_max,
    shared_sum,
    score_scale,
    eps,
    table_stride,
    block_stride,
    value_offset,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    COUNTED: tl.constexpr,
    TARGET: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    QK_NORM: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    g = tl.arange(0, GROUP_P2)
    d = tl.arange(0, HEAD_DIM)
    t = tl.arange(0, TILE)
    slot = tl.load(row_slot_r + row)
    length = tl.load(kv_len_r + row)
    first = 0
    if PARTS > 0:
        first = shared_tiles(shared_2, block_table_sb, slot, length, table_stride, TILE)
    least = least_share(kv_len_r, tl.num_programs(1), MIN_TILES, COUNTED, TARGET, WINDOW, TILE)
    low, high, end, num_shares = share(length, first, split, least, SPLITS, WINDOW, TILE)
    blocks = block_table_sb + slot.to(tl.int64) * table_stride
    block = tl.load(blocks + tl.minimum(low, end - 1))
    HALF: tl.constexpr = HEAD_DIM // 2
    swapped = (d + HALF) % HEAD_DIM
    angles = rotary_table + (length - 1).to(tl.int64) * HEAD_DIM + d % HALF
    cos = tl.load(angles)
    sin = tl.load(angles + HALF) * tl.where(d < HALF, -1.0, 1.0)
    if QK_NORM:
        q_gain = tl.load(q_gain_d + d).to(tl.float32)
        q_swapped_gain = tl.load(q_gain_d + swapped).to(tl.float32)
        k_gain = tl.load(k_gain_d + d).to(tl.float32)
        k_swapped_gain = tl.load(k_gain_d + swapped).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if low < high:
        row_head = row * KV_HEADS + head
        row_base = qkv + row.to(tl.int64) * ((KV_HEADS * (GROUP + 2)) * HEAD_DIM)
        is_head = (g < GROUP)[:, None]
        q_places = row_base + (head * GROUP + g)[:, None] * HEAD_DIM
        q = tl.load(q_places + d[None, :], mask=is_head, other=0.0).to(tl.float32)
        q_swapped = tl.load(q_places + swapped[None, :], mask=is_head, other=0.0).to(tl.float32)
        k_base = row_base + (KV_HEADS * GROUP + head) * HEAD_DIM  # of the newest token: on its way beside q
        k = tl.load(k_base + d).to(tl.float32)
        k_swapped = tl.load(k_base + swapped).to(tl.float32)
        v_d = tl.load(k_base + KV_HEADS * HEAD_DIM + d).to(kv_cache.dtype.element_ty)
        if QK_NORM:
            q_norm = tl.rsqrt(tl.sum(q * q, 1) / HEAD_DIM + eps)[:, None]
            q = q * q_norm * q_gain[None, :]
            q_swapped = q_swapped * q_norm * q_swapped_gain[None, :]
            k_norm = tl.rsqrt(tl.sum(k * k, 0) / HEAD_DIM + eps)
            k = k * k_norm * k_gain
            k_swapped = k_swapped * k_norm * k_swapped_gain
        k_d = rotate(k, k_swapped, cos, sin).to(kv_cache.dtype.element_ty)
        q_gd = (rotate(q, q_swapped, cos[None, :], sin[None, :]) * score_scale).to(qkv.dtype.element_ty)
        q_gd = for_products(q_gd, kv_cache)
        q_dg = tl.trans(q_gd)
        top_g = tl.full([GROUP_P2], -1e30, tl.float32)
        sum_g = tl.zeros([GROUP_P2], tl.float32)
        acc_dg = tl.zeros([HEAD_DIM, GROUP_P2], tl.float32)
        if PARTS > 0:
            seen = tl.where(split == 0, first, 0)
            top_g, sum_g, acc_dg = load_parts(
                shared_acc, shared_max, shared_sum, row_head, seen, top_g, sum_g, acc_dg,
                PARTS, GROUP, GROUP_P2, HEAD_DIM,
            )  # fmt: skip
        for tile in range(low, high):
            next_block = tl.load(blocks + tl.minimum(tile + 1, high - 1))
            k_td = k_desc.load([block, head, 0, 0]).reshape(TILE, HEAD_DIM).to(q_gd.dtype)
            v_td = v_desc.load([block, head, 0, 0]).reshape(TILE, HEAD_DIM).to(q_gd.dtype)
            position_t = tile * TILE + t
            is_past_t = position_t < length - 1
            if WINDOW > 0:
                is_past_t = is_past_t & (position_t >= length - WINDOW)
            score_tg = tl.where(is_past_t[:, None], tl.dot(k_td, q_dg), float("-inf"))
            new_top_g = tl.maximum(top_g, tl.max(score_tg, 0))
            shrink_g = tl.exp2(top_g - new_top_g)
            p_tg = tl.exp2(score_tg - new_top_g[None, :])
            sum_g = sum_g * shrink_g + tl.sum(p_tg, 0)
            acc_dg = tl.dot(tl.trans(v_td), p_tg.to(v_td.dtype), acc_dg * shrink_g[None, :])
            top_g = new_top_g
            block = next_block
        if high == end:  # the newest token
            place = block.to(tl.int64) * block_stride + (head * TILE + (length - 1) % TILE) * HEAD_DIM
            tl.store(kv_cache + place + d, k_d)
            tl.store(kv_cache + place + value_offset + d, v_d)
            score_g = tl.sum(q_gd.to(tl.float32) * k_d.to(tl.float32)[None, :], 1)
            new_top_g = tl.maximum(top_g, score_g)
            shrink_g = tl.exp2(top_g - new_top_g)
            p_g = tl.exp2(score_g - new_top_g)
            sum_g = sum_g * shrink_g + p_g
            acc_dg = acc_dg * shrink_g[None, :] + v_d.to(tl.float32)[:, None] * p_g[None, :]
            top_g = new_top_g
        if num_shares == 1:
            if SINKS:
                sink_g = tl.load(sink_h + head * GROUP + g, mask=g < GROUP, other=-1e30).to(tl.float32) * LOG2_E
                new_top_g = tl.maximum(top_g, sink_g)
                shrink_g = tl.exp2(top_g - new_top_g)
                sum_g = sum_g * shrink_g + tl.exp2(sink_g - new_top_g)
                acc_dg = acc_dg * shrink_g[None, :]
            places = out + (row_head * GROUP + g)[None, :] * HEAD_DIM + d[:, None]
            tl.store(places, (acc_dg / sum_g[None, :]).to(out.dtype.element_ty), mask=(g < GROUP)[None, :])
        elif SPLITS > 1:
            part = (row_head * SPLITS + split) * GROUP_P2 + g
            tl.store(split_acc + part[None, :] * HEAD_DIM + d[:, None], acc_dg, mask=(g < GROUP)[None, :])
            tl.store(split_max + part, top_g)
            tl.store(split_sum + part, sum_g)


@triton.jit
def reduce_kernel(
    block_table_sb,
    row_slot_r,
    kv_len_r,
    shared_2,
    split_acc,
    split_max,
    split_sum,
    sink_h,
    out,
    table_stride,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    COUNTED: tl.constexpr,
    TARGET: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)  # a query head
    length = tl.load(kv_len_r + row)
    first = 0
    if PARTS > 0:
        first = shared_tiles(shared_2, block_table_sb, tl.load(row_slot_r + row), length, table_stride, TILE)
    least = least_share(kv_len_r, tl.num_programs(0), MIN_TILES, COUNTED, TARGET, WINDOW, TILE)
    _, _, _, num_shares = share(length, first, 0, least, SPLITS, WINDOW, TILE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if num_shares > 1:
        i = tl.arange(0, SPLITS)
        d = tl.arange(0, HEAD_DIM)
        part = ((row * KV_HEADS + head // GROUP) * SPLITS + i) * GROUP_P2 + head % GROUP
        is_share = i < num_shares
        top = tl.load(split_max + part, mask=is_share, other=-1e30)
        total = tl.load(split_sum + part, mask=is_share, other=0.0)
        acc = tl.load(split_acc + part[:, None] * HEAD_DIM + d[None, :], mask=is_share[:, None], other=0.0)
        best = tl.max(top, 0)
        seen = 0.0
        if SINKS:
            sink = tl.load(sink_h + head).to(tl.float32) * LOG2_E
            best = tl.maximum(best, sink)
            seen = tl.exp2(sink - best)
        weight = tl.exp2(top - best)
        mean = tl.sum(acc * weight[:, None], 0) / (tl.sum(total * weight, 0) + seen)
        tl.store(out + (row * KV_HEADS * GROUP + head) * HEAD_DIM + d, mean.to(out.dtype.element_ty))
