"""Attention of decode rows to the blocks that their block tables begin with and share, so that those are read once for
many rows instead of once a row. What is found waits in `SharedScratch`, where `decode_attention_fused.py` goes on with
the blocks that are a row's own. Cascade inference (Ye et al. 2024), with the join in the second kernel.

A program takes PAIRS (row, query head) pairs of one KV head and one of PARTS parts of the shared blocks; grid (tile of
pairs, KV head, part). Which blocks are shared is read on the device: `shared_2` names a slot and how many blocks its
table shares with others; a row shares them if its own table has the last of them at the same place (blocks hold the
tokens of a whole prefix, so those before are equal too). Other rows are left alone, and programs without work end.

Shape suffixes: m pairs, r rows, s slots, b blocks, d head dim, h half of it, t the tokens of a tile, g query heads of a
KV head, f flat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.paging import for_products


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """How one program walks the shared blocks."""

    pairs: int
    num_warps: int
    num_stages: int


CONFIG = SharedConfig(64, 4, 3)
NUM_PROGRAMS = 256
"""Two a multiprocessor of the device: cut the shared blocks into parts until so many run."""
MAX_PARTS: Final = 8


@triton.jit
def shared_tiles(shared_2, block_table_sb, slot, length, table_stride, TILE: tl.constexpr):
    """How many blocks at the start of a row (or of each of some rows) are shared: all that `shared_2` says or none."""
    count = tl.load(shared_2 + 1)
    last = block_table_sb + tl.maximum(count - 1, 0)
    theirs = tl.load(last + tl.load(shared_2).to(tl.int64) * table_stride)
    own = tl.load(last + slot.to(tl.int64) * table_stride)
    return tl.where((own == theirs) & (count * TILE < length), count, 0)


@triton.jit
def load_parts(
    shared_acc, shared_max, shared_sum, row_head, tiles, top_g, sum_g, acc_dg,
    PARTS: tl.constexpr, GROUP: tl.constexpr, GROUP_P2: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Join what `shared_kernel` found for one row and KV head; `tiles` is how many tiles it saw (0: nothing)."""
    g = tl.arange(0, GROUP_P2)
    d = tl.arange(0, HEAD_DIM)
    in_use = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, PARTS), 1))
    for part in tl.static_range(PARTS):
        place = (row_head * PARTS + part) * GROUP + g
        is_there = (g < GROUP) & (part < in_use)
        part_top = tl.load(shared_max + place, mask=is_there, other=-1e30)
        part_sum = tl.load(shared_sum + place, mask=is_there, other=0.0)
        places = place[None, :].to(tl.int64) * HEAD_DIM + d[:, None]
        part_acc = tl.load(shared_acc + places, mask=is_there[None, :], other=0.0)
        new_top = tl.maximum(top_g, part_top)
        shrink, part_shrink = tl.exp2(top_g - new_top), tl.exp2(part_top - new_top)
        sum_g = sum_g * shrink + part_sum * part_shrink
        acc_dg = acc_dg * shrink[None, :] + part_acc * part_shrink[None, :]
        top_g = new_top
    return top_g, sum_g, acc_dg


@triton.jit(do_not_specialize=["num_rows"])
def shared_kernel(
    qkv,
    k_half_desc,
    v_desc,
    kv_cache,
    block_table_sb,
    row_slot_r,
    kv_len_r,
    shared_2,
    rotary_table,
    q_gain_d,
    shared_acc,
    shared_max,
    shared_sum,
    num_rows,
    score_scale,
    eps,
    table_stride,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    pair_m = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    head = tl.program_id(1)
    part = tl.program_id(2)
    row_m = pair_m // GROUP
    exists_m = row_m < num_rows
    row_m = tl.where(exists_m, row_m, 0)
    member_m = pair_m % GROUP
    slot_m = tl.load(row_slot_r + row_m)
    length_m = tl.load(kv_len_r + row_m)
    tiles_m = shared_tiles(shared_2, block_table_sb, slot_m, length_m, table_stride, TILE)
    shares_m = exists_m & (tiles_m > 0)
    tiles = tl.max(tl.where(shares_m, tiles_m, 0), 0)
    size = tl.cdiv(tiles, PARTS)
    low = part * size
    high = tl.minimum(low + size, tiles)
    blocks = block_table_sb + tl.load(shared_2).to(tl.int64) * table_stride
    block = tl.load(blocks + tl.maximum(tl.minimum(low, high - 1), 0))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if low < high:
        HALF: tl.constexpr = HEAD_DIM // 2
        h = tl.arange(0, HALF)
        angles_mh = rotary_table + ((length_m - 1).to(tl.int64) * HEAD_DIM)[:, None] + h[None, :]
        cos_mh = tl.load(angles_mh)
        sin_mh = tl.load(angles_mh + HALF)
        q_places_m = row_m.to(tl.int64) * ((KV_HEADS * (GROUP + 2)) * HEAD_DIM) + (head * GROUP + member_m) * HEAD_DIM
        q_places_mh = qkv + q_places_m[:, None] + h[None, :]
        low_mh = tl.load(q_places_mh).to(tl.float32)
        high_mh = tl.load(q_places_mh + HALF).to(tl.float32)
        if QK_NORM:
            squares_m = tl.sum(low_mh * low_mh, 1) + tl.sum(high_mh * high_mh, 1)
            norm_m = tl.rsqrt(squares_m / HEAD_DIM + eps)[:, None]
            low_mh = low_mh * norm_m * tl.load(q_gain_d + h).to(tl.float32)[None, :]
            high_mh = high_mh * norm_m * tl.load(q_gain_d + HALF + h).to(tl.float32)[None, :]
        q_low_mh = ((low_mh * cos_mh - high_mh * sin_mh) * score_scale).to(qkv.dtype.element_ty)
        q_high_mh = ((high_mh * cos_mh + low_mh * sin_mh) * score_scale).to(qkv.dtype.element_ty)
        q_low_mh = for_products(q_low_mh, kv_cache)
        q_high_mh = for_products(q_high_mh, kv_cache)
        top_m = tl.full([PAIRS], -1e30, tl.float32)
        sum_m = tl.zeros([PAIRS], tl.float32)
        acc_md = tl.zeros([PAIRS, HEAD_DIM], tl.float32)
        for tile in range(low, high):
            next_block = tl.load(blocks + tl.minimum(tile + 1, high - 1))
            k_low_th = k_half_desc.load([block, head, 0, 0]).reshape(TILE, HALF).to(q_low_mh.dtype)
            k_high_th = k_half_desc.load([block, head, 0, HALF]).reshape(TILE, HALF).to(q_low_mh.dtype)
            v_td = v_desc.load([block, head, 0, 0]).reshape(TILE, HEAD_DIM).to(q_low_mh.dtype)
            score_mt = tl.dot(q_high_mh, tl.trans(k_high_th), tl.dot(q_low_mh, tl.trans(k_low_th)))
            new_top_m = tl.maximum(top_m, tl.max(score_mt, 1))
            shrink_m = tl.exp2(top_m - new_top_m)
            p_mt = tl.exp2(score_mt - new_top_m[:, None])
            sum_m = sum_m * shrink_m + tl.sum(p_mt, 1)
            acc_md = tl.dot(p_mt.to(v_td.dtype), v_td, acc_md * shrink_m[:, None])
            top_m = new_top_m
            block = next_block
        place_m = ((row_m * KV_HEADS + head) * PARTS + part) * GROUP + member_m
        tl.store(shared_max + place_m, top_m, mask=shares_m)
        tl.store(shared_sum + place_m, sum_m, mask=shares_m)
        places_md = place_m[:, None].to(tl.int64) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        tl.store(shared_acc + places_md, acc_md, mask=shares_m[:, None])


@dataclass(frozen=True, slots=True)
class SharedScratch:
    """Where what was found waits, fp32: accumulators, top scores, sums of probabilities of every row and query head."""

    acc_f: Tensor
    max_f: Tensor
    sum_f: Tensor

    @staticmethod
    def sizes(num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        """Floats of each for a step of so many rows."""
        places = num_rows * num_heads * choose_parts(num_rows, num_heads // num_kv_heads, num_kv_heads)
        return places * head_dim, places, places

    @classmethod
    def allocate(
        cls, num_heads: int, num_kv_heads: int, head_dim: int, max_rows: int, device: torch.device
    ) -> SharedScratch:
        """Enough for up to `max_rows` rows."""
        sizes = [cls.sizes(rows, num_heads, num_kv_heads, head_dim) for rows in range(1, max_rows + 1)]
        most = [max(column) for column in zip(*sizes, strict=True)]
        return cls(*(torch.zeros(size, dtype=torch.float32, device=device) for size in most))


def choose_parts(num_rows: int, group: int, num_kv_heads: int) -> int:
    """Parts that the shared blocks are cut into, a power of two: fill the device."""
    programs = triton.cdiv(num_rows * group, CONFIG.pairs) * num_kv_heads
    fill = max(NUM_PROGRAMS // programs, 1)
    return min(1 << fill.bit_length() - 1, MAX_PARTS)


NAMES = (
    "qkv", "v_desc", "kv_cache", "block_table_sb", "row_slot_r", "kv_len_r", "shared_2", "rotary_table",
    "q_gain_d", "shared_acc", "shared_max", "shared_sum", "score_scale", "eps", "table_stride",
)  # fmt: skip
"""Arguments that the two kernels have in common."""


def shared_launch(
    args: dict[str, Any], constants: dict[str, Any], num_rows: int, k_half_desc: TensorDescriptor
) -> Launch:
    """The launch before that of `attention_kernel` with `args` and `constants`. `k_half_desc` reads halves of keys."""
    pairs, group, kv_heads = CONFIG.pairs, constants["GROUP"], constants["KV_HEADS"]
    parts: int = constants["PARTS"]
    names = ("PARTS", "KV_HEADS", "GROUP", "HEAD_DIM", "TILE", "QK_NORM")
    return Launch(
        shared_kernel,
        (triton.cdiv(num_rows * group, pairs), kv_heads, parts),
        {name: args[name] for name in NAMES} | {"k_half_desc": k_half_desc, "num_rows": num_rows},
        {name: constants[name] for name in names} | {"PAIRS": pairs},
        CONFIG.num_warps,
        CONFIG.num_stages,
    )
