"""Paged attention for rows of one token: the grid is (KV head, split, row), each program walks its share of a row's
tiles, and a second kernel combines the shares of rows that need more than one.

Grid and arguments do not depend on lengths, which are read on the device: launches can be captured in a CUDA graph. The
query heads of a KV head are packed and the products are transposed: keys on the 64 wide side of the tensor core, the
few queries on the other. Split-KV after Flash-Decoding (Dao et al. 2023).

Shape suffixes: r rows, g query heads of a KV head (padded), p positions of a tile, d head dim (padded).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch
from octavo.kernels.triton.paging import for_products, scaled, score_factors, tile_blocks, tile_keys, window_kind
from octavo.kernels.triton.target import stages


@dataclass(frozen=True)
class TileConfig:
    """How one program walks the cache."""

    tile: int
    num_warps: int
    num_stages: int


TILES: tuple[tuple[int, TileConfig], ...] = (
    (128, TileConfig(64, 4, 4)),
    (256, TileConfig(64, 4, 3)),
    (512, TileConfig(64, 4, 3)),
    (1024, TileConfig(32, 4, 3)),
    (2048, TileConfig(16, 4, 3)),
)
"""By the bytes of one padded key, at most: K and V of all stages must fit in 227 KB of shared memory."""

SMALL: dict[bool, tuple[tuple[int, TileConfig], ...]] = {
    False: ((128, TileConfig(64, 4, 4)), (256, TileConfig(32, 4, 3)), (512, TileConfig(16, 4, 3))),
    True: ((128, TileConfig(32, 4, 3)), (256, TileConfig(16, 4, 3)), (512, TileConfig(16, 4, 2))),
}
"""Whether numbers have 4 bytes -> by padded head dim, at most, for devices that are `is_small`. From compile-time study
(shared memory, spills)."""

SHORT = TileConfig(64, 4, 2)
"""Where no row is longer than SHORT_LEN and there are many: deep pipelines never fill (measured on H200)."""
SHORT_LEN = 256
SHORT_PROGRAMS = 512

SPLITS: tuple[tuple[int, int, int], ...] = ((16, 16, 1), (32, 8, 1), (64, 4, 2), (128, 2, 2))
"""(rows x KV heads at most, splits, least tiles of a split); more programs than that fill the device unsplit."""


def choose_tile(head_dim: int, itemsize: int, programs: int, max_kv_len: int, *, small: bool = False) -> TileConfig:
    """The tile of a launch. ValueError for head dims beyond the table."""
    dim_pad = triton.next_power_of_2(head_dim)
    key_bytes = dim_pad * itemsize
    if key_bytes <= (128 if small else 256) and max_kv_len <= SHORT_LEN and programs >= SHORT_PROGRAMS:
        return SHORT
    size, table = (dim_pad, SMALL[itemsize == 4]) if small else (key_bytes, TILES)
    for limit, config in table:
        if size <= limit:
            return config
    raise ValueError(f"head_dim {head_dim} of {itemsize}-byte numbers is beyond what paged attention supports")


def choose_splits(programs: int, max_kv_len: int, tile: int) -> tuple[int, int]:
    """(splits, least tiles of a split): enough programs to fill the device, and for short rows no more than there are
    tiles. Lengths count in two classes only, so that growing sequences do not meet a new kernel again and again."""
    for limit, splits, least in SPLITS:
        if programs <= limit:
            is_short = max_kv_len <= SHORT_LEN
            return min(splits, triton.cdiv(SHORT_LEN, tile * least)) if is_short else splits, least
    return 1, 1


@triton.jit
def split_range(
    length, window, split, SPLITS: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr, WINDOWED: tl.constexpr
):
    """(first visible position, this split's tiles [low, high), splits in use) of a row. WINDOWED: 1, a token sees
    `window` positions; 2, those of its own run of `window` positions; 0, all."""
    first = 0
    if WINDOWED == 1:
        first = tl.maximum(length - window, 0)
    elif WINDOWED == 2:
        first = (length - 1) // window * window
    start = first // TILE
    tiles = tl.cdiv(length, TILE) - start
    share = tl.maximum(tl.cdiv(tiles, SPLITS), LEAST)
    low = start + split * share
    high = tl.minimum(low + share, start + tiles)
    return first, low, high, tl.cdiv(tiles, share)


ROW_ARRAYS = ["slot_ptr", "length_ptr", "rows_ptr"]


@triton.jit(do_not_specialize=["window", "table_stride"], do_not_specialize_on_alignment=ROW_ARRAYS)
def decode_kernel(
    q_ptr, cache_ptr, table_ptr, slot_ptr, length_ptr, rows_ptr, out_ptr, part_ptr, stat_ptr, sink_ptr,
    scale, cap, window, table_stride,
    q_stride: tl.constexpr, block_stride: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, COUNTED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """One share of one row and KV head. Writes the output if the row needs one split, else unscaled sums to `part`
    [r, KV_HEADS, SPLITS, GROUP_PAD, DIM_PAD] and (greatest, sum) to `stat` [r, KV_HEADS, SPLITS, 2, GROUP_PAD].
    COUNTED: how many rows there are is on the device. SINKS: one more score a query head, without a value."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(length_ptr + row)
    table_row = table_ptr + tl.load(slot_ptr + row).to(tl.int64) * table_stride
    first, low, high, used = split_range(length, window, split, SPLITS, LEAST, TILE, WINDOWED)
    is_wanted = (split == 0) | (low < high)
    if COUNTED:
        is_wanted = is_wanted & (row < tl.load(rows_ptr))
    if is_wanted:
        group_g = tl.arange(0, GROUP_PAD)
        dim_d = tl.arange(0, DIM_PAD)
        in_group = group_g < GROUP
        in_dim = dim_d < DIM
        q_offset = row.to(tl.int64) * q_stride + (head * GROUP + group_g)[None, :] * DIM + dim_d[:, None]
        q_dg = tl.load(q_ptr + q_offset, mask=in_dim[:, None] & in_group[None, :], other=0.0)
        q_dg = for_products(q_dg, cache_ptr)
        cache_head = cache_ptr + head * BLOCK * DIM
        value_offset = KV_HEADS * BLOCK * DIM
        greatest_g = tl.full([GROUP_PAD], -1e30, tl.float32)
        sum_g = tl.zeros([GROUP_PAD], tl.float32)
        if SINKS:  # of the first share
            sink_g = tl.load(sink_ptr + head * GROUP + group_g, mask=in_group, other=0.0).to(tl.float32)
            greatest_g = tl.where(split == 0, sink_g * 1.4426950408889634, -1e30)
            sum_g += tl.where(split == 0, 1.0, 0.0)
        out_dg = tl.zeros([DIM_PAD, GROUP_PAD], tl.float32)
        blocks = tile_blocks(table_row, low, high - 1, length, BLOCK, TILE)
        for tile in range(low, high):
            next_blocks = tile_blocks(table_row, tile + 1, high - 1, length, BLOCK, TILE)
            position_p = tile * TILE + tl.arange(0, TILE)
            visible_p = position_p < length
            if WINDOWED:
                visible_p = visible_p & (position_p >= first)
            key_pd = tile_keys(cache_head, blocks, tile, block_stride, BLOCK, TILE, DIM)[:, None] + dim_d[None, :]
            mask_pd = visible_p[:, None] & in_dim[None, :]
            k_pd = tl.load(key_pd, mask=mask_pd, other=0.0).to(q_dg.dtype)
            v_pd = tl.load(key_pd + value_offset, mask=mask_pd, other=0.0).to(q_dg.dtype)
            score_pg = scaled(tl.dot(k_pd, q_dg, input_precision=PRECISION), scale, cap, CAPPED)
            score_pg = tl.where(visible_p[:, None], score_pg, -float("inf"))
            new_g = tl.maximum(greatest_g, tl.max(score_pg, 0))
            rescale_g = tl.exp2(greatest_g - new_g)
            weight_pg = tl.exp2(score_pg - new_g[None, :])
            sum_g = sum_g * rescale_g + tl.sum(weight_pg, 0)
            out_dg = tl.dot(
                tl.trans(v_pd), weight_pg.to(v_pd.dtype), out_dg * rescale_g[None, :], input_precision=PRECISION
            )
            greatest_g = new_g
            blocks = next_blocks
        mask_dg = in_dim[:, None] & in_group[None, :]
        if used <= 1:
            out_offset = (row.to(tl.int64) * KV_HEADS + head) * GROUP * DIM
            out_offset += group_g[None, :] * DIM + dim_d[:, None]
            # A row without visible keys has sum 0 and gets zeros.
            result_dg = out_dg / tl.where(sum_g > 0, sum_g, 1.0)[None, :]
            tl.store(out_ptr + out_offset, result_dg.to(out_ptr.dtype.element_ty), mask=mask_dg)
        else:
            share = ((row.to(tl.int64) * KV_HEADS + head) * SPLITS + split) * GROUP_PAD
            tl.store(part_ptr + (share + group_g)[None, :] * DIM_PAD + dim_d[:, None], out_dg, mask=mask_dg)
            tl.store(stat_ptr + share * 2 + group_g, greatest_g)
            tl.store(stat_ptr + share * 2 + GROUP_PAD + group_g, sum_g)


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=ROW_ARRAYS)
def reduce_kernel(
    out_ptr, length_ptr, rows_ptr, part_ptr, stat_ptr, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOWED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Combine the shares of one row and query head, if the row used more than one split."""
    row = tl.program_id(0)
    query_head = tl.program_id(1)
    _, _, _, used = split_range(tl.load(length_ptr + row), window, 0, SPLITS, LEAST, TILE, WINDOWED)
    if COUNTED:
        used = tl.where(row < tl.load(rows_ptr), used, 0)
    if used > 1:
        split_s = tl.arange(0, SPLITS)
        dim_d = tl.arange(0, DIM_PAD)
        in_use = split_s < used
        member = query_head % GROUP
        share_s = ((row.to(tl.int64) * KV_HEADS + query_head // GROUP) * SPLITS + split_s) * GROUP_PAD
        greatest_s = tl.load(stat_ptr + share_s * 2 + member, mask=in_use, other=-1e30)
        sum_s = tl.load(stat_ptr + share_s * 2 + GROUP_PAD + member, mask=in_use, other=0.0)
        mask_sd = in_use[:, None] & (dim_d < DIM)[None, :]
        part_sd = tl.load(part_ptr + (share_s + member)[:, None] * DIM_PAD + dim_d[None, :], mask=mask_sd, other=0.0)
        weight_s = tl.exp2(greatest_s - tl.max(greatest_s, 0))
        result_d = tl.sum(part_sd * weight_s[:, None], 0) / tl.sum(sum_s * weight_s, 0)
        out_offset = (row.to(tl.int64) * KV_HEADS * GROUP + query_head) * DIM + dim_d
        tl.store(out_ptr + out_offset, result_d.to(out_ptr.dtype.element_ty), mask=dim_d < DIM)


@dataclass(frozen=True)
class DecodePlan:
    """Shapes of a launch that do not depend on lengths."""

    config: TileConfig
    splits: int
    least: int
    group_pad: int
    dim_pad: int

    def scratch_sizes(self, num_rows: int, kv_heads: int) -> tuple[int, int]:
        """Floats of (part, stat)."""
        shares = num_rows * kv_heads * self.splits * self.group_pad
        return (shares * self.dim_pad, shares * 2) if self.splits > 1 else (0, 0)


@cache
def plan_decode(
    num_rows: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, max_kv_len: int, *, small: bool = False
) -> DecodePlan:
    """Tile and splits of a launch over `num_rows` rows of at most `max_kv_len` positions; `small`: on a device that is
    `target.is_small`."""
    config = choose_tile(head_dim, itemsize, num_rows * kv_heads, max_kv_len, small=small)
    splits, least = choose_splits(num_rows * kv_heads, max_kv_len, config.tile)
    group_pad = max(16, triton.next_power_of_2(heads // kv_heads))
    return DecodePlan(config, splits, least, group_pad, max(16, triton.next_power_of_2(head_dim)))


def paged_decode(
    q_rhd: Tensor,
    kv_cache: Tensor,
    block_table_sb: Tensor,
    row_slot_r: Tensor,
    kv_len_r: Tensor,
    out_rhd: Tensor,
    plan: DecodePlan,
    part: Tensor,
    stat: Tensor,
    *,
    num_rows: int,
    scale: float,
    window: int,
    soft_cap: float,
    chunk: int = 0,
    sink_h: Tensor | None = None,
    num_rows_1: Tensor | None = None,
) -> None:
    """Attention of rows [0, num_rows), whose tokens are the first num_rows of q, into `out_rhd`; with `num_rows_1`
    (int32 [1]), of as many rows as it says, which are not more.

    kv_cache [num_blocks, 2, kv heads, block_size, head dim] is contiguous; q's tokens may lie apart. `part` and `stat`
    are fp32 of `plan.scratch_sizes`, contents of no meaning. Reads nothing beyond a row's length. `chunk` and `sink_h`
    as in `kernels.reference.paged_attention`.
    """
    kv_heads, block_size, head_dim = kv_cache.shape[2:]
    group = q_rhd.shape[1] // kv_heads
    factor, cap = score_factors(scale, soft_cap)
    kind, window = window_kind(window, chunk)
    heads = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_PAD": plan.group_pad,
        "DIM": head_dim,
        "DIM_PAD": plan.dim_pad,
    }
    splits = {"TILE": plan.config.tile, "SPLITS": plan.splits, "LEAST": plan.least, "WINDOWED": kind}
    constants = {
        "q_stride": q_rhd.stride(0),
        "block_stride": kv_cache.stride(0),
        **heads,
        "BLOCK": block_size,
        **splits,
        "CAPPED": soft_cap > 0,
        "PRECISION": "ieee" if kv_cache.dtype == torch.float32 else "tf32",
        "COUNTED": num_rows_1 is not None,
        "SINKS": sink_h is not None,
    }
    count = kv_len_r if num_rows_1 is None else num_rows_1
    args = (q_rhd, kv_cache, block_table_sb, row_slot_r, kv_len_r, count, out_rhd, part, stat)
    sinks = q_rhd if sink_h is None else sink_h
    launch(
        decode_kernel,
        (kv_heads, plan.splits, num_rows),
        (*args, sinks, factor, cap, window, block_table_sb.stride(0)),
        constants,
        num_warps=plan.config.num_warps,
        num_stages=stages(
            plan.config.num_stages, 2 * plan.config.tile * plan.dim_pad * kv_cache.element_size(), kv_cache.device
        ),
    )
    if plan.splits > 1:
        shares = (out_rhd, kv_len_r, count, part, stat, window)
        combined = heads | splits | {"COUNTED": num_rows_1 is not None}
        launch(reduce_kernel, (num_rows, q_rhd.shape[1], 1), shares, combined, num_warps=2)
