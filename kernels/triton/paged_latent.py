"""Paged attention over a cache of latents (DeepSeek-V2's multi-head latent attention, absorbed): one vector a token
[latent | rotated part] is the key of every query head, and its latent part is the value.

One kernel takes decode rows (with splits, which paged_decode's second kernel combines) and prompts. A program takes
ROWS (query, head) pairs of one row, and reads each latent once for scores and sums.

Shape suffixes: m pairs, p positions of a tile, l latent dim (padded), r rotated dim (padded).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.handles import launch
from octavo.kernels.triton.paged_decode import choose_splits, reduce_kernel, split_range
from octavo.kernels.triton.paging import for_products, prompt_precision, score_factors, tile_blocks, tile_keys
from octavo.kernels.triton.target import is_amd, is_small, stages


@dataclass(frozen=True)
class LatentPlan:
    """How a launch cuts its work; depends on no length."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    splits: int
    least: int
    group_pad: int
    latent_pad: int

    def scratch_sizes(self, num_rows: int) -> tuple[int, int]:
        """Floats of (part, stat)."""
        shares = num_rows * self.splits * self.group_pad
        return (shares * self.latent_pad, shares * 2) if self.splits > 1 else (0, 0)


WIDE: Final = (64, 32, 8)
"""(pairs, positions of a program, warps of one of at least 32 pairs), of numbers in less than 4 bytes."""
NARROW: Final = (32, 16, 4)
"""The same where shared memory or registers are fewer: 64 pairs' sums do not fit. From compile-time study."""


def is_narrow(device: torch.device) -> bool:
    """All devices but Hopper and the data centers' Blackwell."""
    return is_amd() or is_small(device)


@cache
def plan_latent(
    num_rows: int, heads: int, value_dim: int, itemsize: int, max_kv_len: int, *, is_decode: bool, narrow: bool = False
) -> LatentPlan:
    """For `num_rows` rows: of one token each, in splits where they are few, or prompts. `narrow`: on a device where
    less fits (`is_narrow`)."""
    group_pad = max(16, triton.next_power_of_2(heads))
    most, tile, most_warps = NARROW if narrow else WIDE
    if itemsize == 4:
        most, tile = 16, 16
    rows = min(most, group_pad) if is_decode else most
    splits, least = choose_splits(num_rows * (group_pad // rows), max_kv_len, tile) if is_decode else (1, 1)
    warps = most_warps if rows >= 32 else 4
    latent_pad = max(16, triton.next_power_of_2(value_dim))
    return LatentPlan(rows, tile, warps, 2 if itemsize < 4 else 1, splits, least, group_pad, latent_pad)


@triton.jit(
    do_not_specialize=["first_row", "table_stride"],
    do_not_specialize_on_alignment=["slot_ptr", "start_ptr", "length_ptr", "count_ptr"],
)
def latent_kernel(
    q_ptr, cache_ptr, table_ptr, slot_ptr, start_ptr, length_ptr, count_ptr, out_ptr, part_ptr, stat_ptr,
    scale, first_row, table_stride,
    q_stride: tl.constexpr, block_stride: tl.constexpr,
    HEADS: tl.constexpr, GROUP_PAD: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, DECODE: tl.constexpr, PRECISION: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """ROWS pairs of a row and one share of what they see: pair i is query i // HEADS, head i % HEADS. COUNTED: `count`
    says how many rows decode (those have one query), or which row is the first. Shares as paged_decode's."""
    pair_tile = tl.program_id(0)
    split = tl.program_id(1)
    row = first_row + tl.program_id(2)
    if COUNTED and not DECODE:
        row = tl.load(count_ptr) + tl.program_id(2)
    start = row
    queries = 1
    if not DECODE:
        start = tl.load(start_ptr + row)
        queries = tl.load(start_ptr + row + 1) - start
    length = tl.load(length_ptr + row)
    newest = length - queries + tl.minimum((pair_tile * ROWS + ROWS - 1) // HEADS, queries - 1)
    _, low, high, used = split_range(newest + 1, 0, split, SPLITS, LEAST, TILE, 0)
    is_wanted = (pair_tile * ROWS < queries * HEADS) & ((split == 0) | (low < high))
    if COUNTED and DECODE:
        is_wanted = is_wanted & (row < tl.load(count_ptr))
    if is_wanted:
        table_row = table_ptr + tl.load(slot_ptr + row).to(tl.int64) * table_stride
        pair_m = pair_tile * ROWS + tl.arange(0, ROWS)
        query_m = pair_m // HEADS
        latent_l = tl.arange(0, LATENT_PAD)
        rotated_r = tl.arange(0, ROTATED_PAD)
        DIM: tl.constexpr = LATENT + ROTATED
        is_pair_m = query_m < queries
        mask_ml = is_pair_m[:, None] & (latent_l < LATENT)[None, :]
        token_m = (start + query_m).to(tl.int64)
        q_m = q_ptr + token_m * q_stride + (pair_m % HEADS) * DIM
        q_ml = for_products(tl.load(q_m[:, None] + latent_l[None, :], mask=mask_ml, other=0.0), cache_ptr)
        mask_mr = is_pair_m[:, None] & (rotated_r < ROTATED)[None, :]
        q_mr = for_products(tl.load(q_m[:, None] + LATENT + rotated_r[None, :], mask=mask_mr, other=0.0), cache_ptr)
        position_m = length - queries + query_m
        greatest_m = tl.full([ROWS], -1e30, tl.float32)
        sum_m = tl.zeros([ROWS], tl.float32)
        out_ml = tl.zeros([ROWS, LATENT_PAD], tl.float32)
        blocks = tile_blocks(table_row, low, high - 1, newest + 1, BLOCK, TILE)
        for tile in range(low, high):
            next_blocks = tile_blocks(table_row, tile + 1, high - 1, newest + 1, BLOCK, TILE)
            position_p = tile * TILE + tl.arange(0, TILE)
            inside_p = position_p <= newest
            key_p = tile_keys(cache_ptr, blocks, tile, block_stride, BLOCK, TILE, DIM)
            key_pl = key_p[:, None] + latent_l[None, :]
            k_pl = tl.load(key_pl, mask=inside_p[:, None] & (latent_l < LATENT)[None, :], other=0.0).to(q_ml.dtype)
            key_pr = key_p[:, None] + LATENT + rotated_r[None, :]
            k_pr = tl.load(key_pr, mask=inside_p[:, None] & (rotated_r < ROTATED)[None, :], other=0.0).to(q_ml.dtype)
            score_mp = tl.dot(q_ml, tl.trans(k_pl), input_precision=PRECISION)
            score_mp = tl.dot(q_mr, tl.trans(k_pr), score_mp, input_precision=PRECISION) * scale
            score_mp = tl.where(position_p[None, :] <= position_m[:, None], score_mp, -float("inf"))
            new_m = tl.maximum(greatest_m, tl.max(score_mp, 1))
            rescale_m = tl.exp2(greatest_m - new_m)
            weight_mp = tl.exp2(score_mp - new_m[:, None])
            sum_m = sum_m * rescale_m + tl.sum(weight_mp, 1)
            out_ml = tl.dot(weight_mp.to(k_pl.dtype), k_pl, out_ml * rescale_m[:, None], input_precision=PRECISION)
            greatest_m = new_m
            blocks = next_blocks
        if SPLITS == 1 or used <= 1:
            out_offset = (token_m[:, None] * HEADS + (pair_m % HEADS)[:, None]) * LATENT + latent_l[None, :]
            result_ml = out_ml / tl.where(sum_m > 0, sum_m, 1.0)[:, None]
            tl.store(out_ptr + out_offset, result_ml.to(out_ptr.dtype.element_ty), mask=mask_ml)
        else:
            share_m = (row.to(tl.int64) * SPLITS + split) * GROUP_PAD + pair_m
            tl.store(part_ptr + share_m[:, None] * LATENT_PAD + latent_l[None, :], out_ml, mask=mask_ml)
            stat_m = stat_ptr + (row.to(tl.int64) * SPLITS + split) * GROUP_PAD * 2 + pair_m
            tl.store(stat_m, greatest_m, mask=is_pair_m)
            tl.store(stat_m + GROUP_PAD, sum_m, mask=is_pair_m)


def paged_latent(
    q_thd: Tensor,
    kv_cache: Tensor,
    block_table_sb: Tensor,
    row_slot_r: Tensor,
    query_start_r: Tensor,
    kv_len_r: Tensor,
    out_thl: Tensor,
    plan: LatentPlan,
    part: Tensor,
    stat: Tensor,
    *,
    first_row: int,
    num_rows: int,
    max_query_len: int,
    scale: float,
    is_decode: bool,
    count_1: Tensor | None = None,
) -> None:
    """Attention of rows [first_row, num_rows) into `out_thl`. Decode rows start at 0 and have one token each.

    kv_cache [num_blocks, 1, 1, block_size, head dim] is contiguous; q's tokens may lie apart. `count_1` (int32 [1]):
    how many rows decode, or which row is the first of at most num_rows - first_row. `part` and `stat` are fp32 of
    `plan.scratch_sizes`.
    """
    block_size, head_dim = kv_cache.shape[3:]
    heads, value_dim = q_thd.shape[1], out_thl.shape[2]
    count = num_rows - first_row
    factor, _ = score_factors(scale, 0.0)
    counted = query_start_r if count_1 is None else count_1
    args = (q_thd, kv_cache, block_table_sb, row_slot_r, query_start_r, kv_len_r, counted, out_thl, part, stat)
    rotated_pad = max(16, triton.next_power_of_2(head_dim - value_dim))
    shares = {"TILE": plan.tile, "SPLITS": plan.splits, "LEAST": plan.least}
    constants = {
        "q_stride": q_thd.stride(0),
        "block_stride": kv_cache.stride(0),
        "HEADS": heads,
        "GROUP_PAD": plan.group_pad,
        "LATENT": value_dim,
        "LATENT_PAD": plan.latent_pad,
        "ROTATED": head_dim - value_dim,
        "ROTATED_PAD": rotated_pad,
        "BLOCK": block_size,
        "ROWS": plan.rows,
        **shares,
        "DECODE": is_decode,
        "PRECISION": "ieee" if is_small(kv_cache.device) else prompt_precision(kv_cache.dtype),
        "COUNTED": count_1 is not None,
    }
    launch(
        latent_kernel,
        (triton.cdiv((1 if is_decode else max_query_len) * heads, plan.rows), plan.splits, count),
        (*args, factor, first_row, block_table_sb.stride(0)),
        constants,
        num_warps=plan.num_warps,
        num_stages=stages(
            plan.num_stages, plan.tile * (plan.latent_pad + rotated_pad) * kv_cache.element_size(), kv_cache.device
        ),
    )
    if plan.splits > 1:
        sizes = {"KV_HEADS": 1, "GROUP": heads, "GROUP_PAD": plan.group_pad, "DIM": value_dim}
        combined = sizes | {"DIM_PAD": plan.latent_pad} | shares | {"WINDOWED": 0, "COUNTED": count_1 is not None}
        launch(reduce_kernel, (num_rows, heads, 1), (out_thl, kv_len_r, counted, part, stat, 0), combined, num_warps=4)
