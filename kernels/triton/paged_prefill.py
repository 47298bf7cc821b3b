"""Paged attention for rows of any number of tokens: prompts, chunks of prompts, and decoding rows among them.

One program takes ROWS (query, head) pairs of one KV head of one row and walks the row's cache up to the last of them.
Tiles that every pair sees in full run without masks. Online softmax after FlashAttention-2 (Dao 2023).

Shape suffixes: m pairs, p positions of a tile, d head dim (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch
from octavo.kernels.triton.paging import (
    for_products,
    prompt_precision,
    scaled,
    score_factors,
    tile_blocks,
    tile_keys,
    window_kind,
)
from octavo.kernels.triton.target import is_small, stages


@dataclass(frozen=True)
class PrefillConfig:
    """Pairs and positions of a program."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


HALF: tuple[tuple[int, PrefillConfig], ...] = (
    (128, PrefillConfig(64, 64, 4, 3)),
    (256, PrefillConfig(64, 32, 4, 2)),
    (512, PrefillConfig(32, 16, 4, 2)),
)
"""By padded head dim, at most: numbers of a cache in 2 bytes, or in one (e4m3). At head dim 128 the best or within 1%
of it on an H200 from 1 x 1024 to 4 x 8192 tokens; programs of 128 pairs and 8 warps are 2-10% slower but for the
longest."""

SINGLE: tuple[tuple[int, PrefillConfig], ...] = (
    (128, PrefillConfig(32, 32, 4, 2)),
    (256, PrefillConfig(16, 32, 4, 2)),
    (512, PrefillConfig(16, 16, 4, 1)),
)
"""By padded head dim, at most: fp32, which has no tensor cores at full precision. For checks, not for speed."""

SMALL: dict[bool, tuple[tuple[int, PrefillConfig], ...]] = {
    False: (
        (64, PrefillConfig(64, 64, 4, 3)),
        (128, PrefillConfig(64, 64, 8, 3)),
        (256, PrefillConfig(64, 32, 8, 2)),
        (512, PrefillConfig(32, 16, 8, 2)),
    ),
    True: (
        (64, PrefillConfig(16, 32, 4, 2)),
        (128, PrefillConfig(32, 32, 4, 2)),
        (256, PrefillConfig(16, 32, 4, 1)),
        (512, PrefillConfig(16, 16, 4, 1)),
    ),
}
"""Whether numbers have 4 bytes -> by padded head dim, at most, for devices that are `is_small`. From compile-time study
(shared memory, spills)."""


def choose_config(dim_pad: int, itemsize: int, *, small: bool = False) -> PrefillConfig:
    """The config for a padded head dim of `itemsize`-byte numbers; `small`: on a device that is `target.is_small`."""
    for limit, config in SMALL[itemsize == 4] if small else SINGLE if itemsize == 4 else HALF:
        if dim_pad <= limit and itemsize in (1, 2, 4):
            return config
    raise ValueError(f"head dim {dim_pad} of {itemsize}-byte numbers is beyond what paged attention supports")


@triton.jit
def walk(
    q_md, out_md, greatest_m, sum_m, position_m, cache_head, table_row, low, high, length,
    scale, cap, window, block_stride,
    VALUE_OFFSET: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take tiles [low, high) into (output, greatest, sum). Without MASKED every pair must see all of every tile."""
    dim_d = tl.arange(0, DIM_PAD)
    in_dim = dim_d < DIM
    blocks = tile_blocks(table_row, low, high - 1, length, BLOCK, TILE)
    for tile in range(low, high):
        next_blocks = tile_blocks(table_row, tile + 1, high - 1, length, BLOCK, TILE)
        position_p = tile * TILE + tl.arange(0, TILE)
        key_pd = tile_keys(cache_head, blocks, tile, block_stride, BLOCK, TILE, DIM)[:, None] + dim_d[None, :]
        if MASKED:
            mask_pd = (position_p < length)[:, None] & in_dim[None, :]
            k_pd = tl.load(key_pd, mask=mask_pd, other=0.0)
            v_pd = tl.load(key_pd + VALUE_OFFSET, mask=mask_pd, other=0.0)
        elif DIM != DIM_PAD:
            k_pd = tl.load(key_pd, mask=in_dim[None, :], other=0.0)
            v_pd = tl.load(key_pd + VALUE_OFFSET, mask=in_dim[None, :], other=0.0)
        else:
            k_pd = tl.load(key_pd)
            v_pd = tl.load(key_pd + VALUE_OFFSET)
        k_pd = k_pd.to(q_md.dtype)
        v_pd = v_pd.to(q_md.dtype)
        score_mp = tl.dot(q_md, tl.trans(k_pd), input_precision=PRECISION)
        if CAPPED:
            score_mp = scaled(score_mp, scale, cap, CAPPED)
        if MASKED:
            visible_mp = position_p[None, :] <= position_m[:, None]
            if WINDOWED == 1:
                visible_mp = visible_mp & (position_p[None, :] > position_m[:, None] - window)
            elif WINDOWED == 2:
                visible_mp = visible_mp & (position_p[None, :] >= (position_m // window * window)[:, None])
            score_mp = tl.where(visible_mp, score_mp, -float("inf"))
        # Scaled within the exponent: one multiply-add a score. The scale is positive.
        factor = 1.0 if CAPPED else scale
        new_m = tl.maximum(greatest_m, tl.max(score_mp, 1) * factor)
        rescale_m = tl.exp2(greatest_m - new_m)
        weight_mp = tl.exp2(score_mp * factor - new_m[:, None])
        sum_m = sum_m * rescale_m + tl.sum(weight_mp, 1)
        out_md = tl.dot(weight_mp.to(v_pd.dtype), v_pd, out_md * rescale_m[:, None], input_precision=PRECISION)
        greatest_m = new_m
        blocks = next_blocks
    return out_md, greatest_m, sum_m


@triton.jit(
    do_not_specialize=["first_row", "num_tiles", "window", "table_stride"],
    do_not_specialize_on_alignment=["slot_ptr", "start_ptr", "length_ptr", "first_ptr"],
)
def prefill_kernel(
    q_ptr, cache_ptr, table_ptr, slot_ptr, start_ptr, length_ptr, first_ptr, out_ptr, sink_ptr,
    scale, cap, window, first_row, num_tiles, table_stride,
    q_stride: tl.constexpr, block_stride: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, COUNTED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """ROWS pairs of a row: pair i is query i // GROUP, head kv_head * GROUP + i % GROUP. COUNTED: the first row's
    number is on the device. WINDOWED as in paged_decode. SINKS: one more score a query head, without a value."""
    # The last tiles see the most keys: those of all heads go first, or the row's end would wait for the last head's.
    head = tl.program_id(0) % KV_HEADS
    rank = tl.program_id(0) // KV_HEADS
    row = first_row + rank // num_tiles
    if COUNTED:
        row = tl.load(first_ptr) + rank // num_tiles
    start = tl.load(start_ptr + row)
    queries = tl.load(start_ptr + row + 1) - start
    pair_tile = tl.cdiv(queries * GROUP, ROWS) - 1 - rank % num_tiles
    if pair_tile >= 0:
        length = tl.load(length_ptr + row)
        table_row = table_ptr + tl.load(slot_ptr + row).to(tl.int64) * table_stride
        pair_m = pair_tile * ROWS + tl.arange(0, ROWS)
        query_m = pair_m // GROUP
        dim_d = tl.arange(0, DIM_PAD)
        mask_md = (query_m < queries)[:, None] & (dim_d < DIM)[None, :]
        token_m = (start + query_m).to(tl.int64)
        inside_md = (head * GROUP + pair_m % GROUP)[:, None] * DIM + dim_d[None, :]
        q_md = tl.load(q_ptr + token_m[:, None] * q_stride + inside_md, mask=mask_md, other=0.0)
        q_md = for_products(q_md, cache_ptr)
        position_m = length - queries + query_m
        oldest = length - queries + pair_tile * ROWS // GROUP
        newest = length - queries + tl.minimum((pair_tile * ROWS + ROWS - 1) // GROUP, queries - 1)
        high = newest // TILE + 1
        # Tiles [full_low, full_high) are seen in full by every pair.
        low = 0
        full_low = 0
        full_high = (oldest + 1) // TILE
        if WINDOWED == 1:
            low = tl.maximum(oldest - window + 1, 0) // TILE
            full_low = tl.minimum(tl.cdiv(tl.maximum(newest - window + 1, 0), TILE), high)
        elif WINDOWED == 2:
            low = oldest // window * window // TILE
            full_low = tl.minimum(tl.cdiv(newest // window * window, TILE), high)
        if WINDOWED:
            full_high = tl.maximum(full_high, full_low)
        cache_head = cache_ptr + head * BLOCK * DIM
        greatest_m = tl.full([ROWS], -1e30, tl.float32)
        sum_m = tl.zeros([ROWS], tl.float32)
        if SINKS:
            sink_m = tl.load(sink_ptr + head * GROUP + pair_m % GROUP).to(tl.float32)
            greatest_m = sink_m * 1.4426950408889634
            sum_m += 1.0
        out_md = tl.zeros([ROWS, DIM_PAD], tl.float32)
        VALUE_OFFSET: tl.constexpr = KV_HEADS * BLOCK * DIM
        if WINDOWED:
            out_md, greatest_m, sum_m = walk(
                q_md, out_md, greatest_m, sum_m, position_m, cache_head, table_row, low, full_low, newest + 1,
                scale, cap, window, block_stride,
                VALUE_OFFSET, DIM, DIM_PAD, BLOCK, TILE, True, WINDOWED, CAPPED, PRECISION,
            )  # fmt: skip
        out_md, greatest_m, sum_m = walk(
            q_md, out_md, greatest_m, sum_m, position_m, cache_head, table_row, full_low, full_high, newest + 1,
            scale, cap, window, block_stride,
            VALUE_OFFSET, DIM, DIM_PAD, BLOCK, TILE, False, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
        out_md, greatest_m, sum_m = walk(
            q_md, out_md, greatest_m, sum_m, position_m, cache_head, table_row, full_high, high, newest + 1,
            scale, cap, window, block_stride,
            VALUE_OFFSET, DIM, DIM_PAD, BLOCK, TILE, True, WINDOWED, CAPPED, PRECISION,
        )  # fmt: skip
        out_md = out_md / tl.where(sum_m > 0, sum_m, 1.0)[:, None]
        out_offset = token_m[:, None] * (KV_HEADS * GROUP * DIM) + inside_md
        tl.store(out_ptr + out_offset, out_md.to(out_ptr.dtype.element_ty), mask=mask_md)


def paged_prefill(
    q_thd: Tensor,
    kv_cache: Tensor,
    block_table_sb: Tensor,
    row_slot_r: Tensor,
    query_start_r: Tensor,
    kv_len_r: Tensor,
    out_thd: Tensor,
    *,
    first_row: int,
    num_rows: int,
    max_query_len: int,
    scale: float,
    window: int,
    soft_cap: float,
    chunk: int = 0,
    sink_h: Tensor | None = None,
    first_row_1: Tensor | None = None,
) -> None:
    """Attention of rows [first_row, num_rows), of at most `max_query_len` queries each, into `out_thd`; with
    `first_row_1` (int32 [1]), of as many rows from that one on, of which those without queries are skipped.

    kv_cache [num_blocks, 2, kv heads, block_size, head dim] is contiguous; q's tokens may lie apart. Reads nothing
    beyond a row's length. `chunk` and `sink_h` as in `kernels.reference.paged_attention`.
    """
    kv_heads, block_size, head_dim = kv_cache.shape[2:]
    group = q_thd.shape[1] // kv_heads
    dim_pad = max(16, triton.next_power_of_2(head_dim))
    count = num_rows - first_row
    config = choose_config(dim_pad, kv_cache.element_size(), small=is_small(kv_cache.device))
    factor, cap = score_factors(scale, soft_cap)
    kind, window = window_kind(window, chunk)
    num_tiles = triton.cdiv(max_query_len * group, config.rows)
    first = query_start_r if first_row_1 is None else first_row_1
    args = (q_thd, kv_cache, block_table_sb, row_slot_r, query_start_r, kv_len_r, first, out_thd)
    args = (*args, q_thd if sink_h is None else sink_h)
    numbers = (factor, cap, window, first_row, num_tiles, block_table_sb.stride(0))
    constants = {
        "q_stride": q_thd.stride(0),
        "block_stride": kv_cache.stride(0),
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "DIM": head_dim,
        "DIM_PAD": dim_pad,
        "BLOCK": block_size,
        "ROWS": config.rows,
        "TILE": config.tile,
        "WINDOWED": kind,
        "CAPPED": soft_cap > 0,
        "PRECISION": prompt_precision(kv_cache.dtype),
        "COUNTED": first_row_1 is not None,
        "SINKS": sink_h is not None,
    }
    launch(
        prefill_kernel,
        (num_tiles * kv_heads * count, 1, 1),
        args + numbers,
        constants,
        num_warps=config.num_warps,
        num_stages=stages(config.num_stages, 2 * config.tile * dim_pad * kv_cache.element_size(), kv_cache.device),
    )
