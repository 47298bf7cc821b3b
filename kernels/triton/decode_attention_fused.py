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
by probability 0, so the cache must hold finite numbers everywhere (it is zeroed once). Not for prompts.

Shape suffixes: r rows, s slots, b blocks, g query heads of a KV head (GROUP, padded to GROUP_P2), d head dim, t the
tokens of a tile.
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
from octavo.kernels.triton.shared_attention import (
    SharedScratch,
    choose_parts,
    load_parts,
    shared_launch,
    shared_tiles,
)

TILE: Final = 64
MAX_SPLITS: Final = 16
LOG2_E = tl.constexpr(1.4426950408889634)
NUM_PROGRAMS: Final = 128
"""About the multiprocessors of the device: split rows until so many programs run."""
SHORT_CONTEXT: Final = 256
"""Up to here splitting pays for a few rows only."""
LONG_CONTEXT: Final = 4096
"""From here on rows may differ so much that even full grids split them."""
LONG_SPLITS: Final = 4
NUM_SHARES: Final = 4 * NUM_PROGRAMS
"""Where rows differ: split long ones until the step has about so many shares."""
MAX_COUNTED: Final = 256
"""Rows that are looked at for that."""


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


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def group_p2(self) -> int:
        """Padded to the least that tensor cores take."""
        return max(8, triton.next_power_of_2(self.group))


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Where shares of split rows wait for the reduction, fp32: accumulators, top scores, sums of probabilities."""

    acc_f: Tensor
    max_f: Tensor
    sum_f: Tensor
    shared: SharedScratch | None
    """For steps whose rows may share blocks."""

    @classmethod
    def allocate(cls, heads: HeadShape, max_rows: int, device: torch.device) -> AttentionScratch:
        """Enough for up to `max_rows` rows, however `choose_splits` splits them and whatever they share."""
        shares = max(rows * choose_splits(rows, heads.num_kv_heads, 1 << 30) for rows in range(1, max_rows + 1))
        parts = shares * heads.num_kv_heads * heads.group_p2
        sizes = (parts * heads.head_dim, parts, parts)
        shared = SharedScratch.allocate(heads.num_heads, heads.num_kv_heads, heads.head_dim, max_rows, device)
        return cls(*(torch.zeros(size, dtype=torch.float32, device=device) for size in sizes), shared)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The step's rows: see `octavo.attention.base.ForwardContext`. `max_kv_len` bounds kv_len."""

    block_table_sb: Tensor
    row_slot_r: Tensor
    kv_len_r: Tensor
    max_kv_len: int
    shared_2: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.row_slot_r.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What a layer brings: gains [d] of the head norms or None, rotary table [positions, d] (cosines, then sines)."""

    heads: HeadShape
    scale: float
    window: int
    q_gain_d: Tensor | None
    k_gain_d: Tensor | None
    norm_eps: float
    rotary_table: Tensor
    sink_h: Tensor | None = None
    """A score for each query head, which weighs in the softmax without a value."""


def choose_splits(num_rows: int, num_kv_heads: int, max_kv_len: int) -> int:
    """Shares a row, a power of two: fill the device, and give ragged long batches some freedom. Lengths count in three
    classes only, so that growing sequences do not meet a new kernel at every block."""
    fill = max(NUM_PROGRAMS // (num_rows * num_kv_heads), 1)
    splits = min(1 << fill.bit_length() - 1, MAX_SPLITS)
    if max_kv_len <= SHORT_CONTEXT:
        return min(splits, SHORT_CONTEXT // TILE) if num_rows < 8 else 1
    return max(splits, LONG_SPLITS) if max_kv_len > LONG_CONTEXT else splits


def choose_stages(num_rows: int, max_kv_len: int) -> int:
    """Depth of the pipeline of tiles: deep for long rows, shallow where many programs share a multiprocessor."""
    if max_kv_len <= SHORT_CONTEXT:
        return 4 if num_rows < 64 else 2
    return 4 if num_rows < 256 else 3


def choose_warps(num_rows: int, max_kv_len: int) -> int:
    """Of a program: fewer where there are many programs, which are short."""
    return 2 if num_rows >= 192 and max_kv_len <= SHORT_CONTEXT else 4


def attend(
    layer: AttentionLayer, qkv_ro: Tensor, kv_cache: Tensor, rows: DecodeRows, scratch: AttentionScratch, out_ro: Tensor
) -> list[Launch]:
    """Write the rows' K and V at position kv_len - 1, then attend: out [r, heads * d] in qkv's dtype.

    qkv [r, (heads + 2 * KV heads) * d]; cache [blocks, 2, KV heads, TILE, d] of qkv's dtype or e4m3; as
    `octavo.kernels.reference.decode_attention_fused.attend`.
    """
    heads, count = layer.heads, rows.num_rows
    assert kv_cache.shape[1:] == (2, heads.num_kv_heads, TILE, heads.head_dim), "blocks of TILE tokens"
    splits = choose_splits(count, heads.num_kv_heads, rows.max_kv_len)
    seen = scratch.shared if rows.shared_2 is not None and not layer.window else None
    has_norm = layer.q_gain_d is not None and layer.k_gain_d is not None
    is_full = count * heads.num_kv_heads >= NUM_PROGRAMS
    constants: dict[str, Any] = {
        "SPLITS": splits,
        "MIN_TILES": 4 if is_full else 1,
        "COUNTED": min(max(triton.next_power_of_2(count), 64), MAX_COUNTED) if is_full and splits > 1 else 0,
        "TARGET": NUM_SHARES // heads.num_kv_heads,
        "PARTS": choose_parts(count, heads.group, heads.num_kv_heads) if seen is not None else 0,
        "WINDOW": layer.window,
        "KV_HEADS": heads.num_kv_heads,
        "GROUP": heads.group,
        "GROUP_P2": heads.group_p2,
        "HEAD_DIM": heads.head_dim,
        "TILE": TILE,
    }
    row_args = {
        "block_table_sb": rows.block_table_sb,
        "row_slot_r": rows.row_slot_r,
        "kv_len_r": rows.kv_len_r,
        "shared_2": rows.kv_len_r if rows.shared_2 is None else rows.shared_2,
        "table_stride": rows.block_table_sb.stride(0),
    }
    sinks = {"sink_h": qkv_ro if layer.sink_h is None else layer.sink_h}
    shares = {"split_acc": scratch.acc_f, "split_max": scratch.max_f, "split_sum": scratch.sum_f}
    args = {
        "qkv": qkv_ro,
        "k_desc": _describe(kv_cache[:, 0], heads.head_dim),
        "v_desc": _describe(kv_cache[:, 1], heads.head_dim),
        "kv_cache": kv_cache,
        **row_args,
        "rotary_table": layer.rotary_table,
        "q_gain_d": layer.q_gain_d if has_norm else qkv_ro,
        "k_gain_d": layer.k_gain_d if has_norm else qkv_ro,
        **sinks,
        "out": out_ro,
        **shares,
        "shared_acc": scratch.acc_f if seen is None else seen.acc_f,
        "shared_max": scratch.max_f if seen is None else seen.max_f,
        "shared_sum": scratch.sum_f if seen is None else seen.sum_f,
        "score_scale": layer.scale * LOG2_E.value,
        "eps": layer.norm_eps,
        "block_stride": kv_cache.stride(0),
        "value_offset": kv_cache.stride(1),
    }
    has_sinks = {"SINKS": layer.sink_h is not None}
    full = constants | {"QK_NORM": has_norm} | has_sinks
    launches = []
    if seen is not None:
        launches.append(shared_launch(args, full, count, _describe(kv_cache[:, 0], heads.head_dim // 2)))
    stages, warps = choose_stages(count, rows.max_kv_len), choose_warps(count, rows.max_kv_len)
    launches.append(Launch(attention_kernel, (heads.num_kv_heads, count, splits), args, full, warps, stages))
    if splits > 1:
        reduce_args = {**row_args, **shares, **sinks, "out": out_ro}
        launches.append(Launch(reduce_kernel, (count, heads.num_heads), reduce_args, constants | has_sinks, 2))
    return launches


def _describe(side_bgtd: Tensor, dims: int) -> TensorDescriptor:
    """K or V of a cache, read a head's block at a time, so many dims of it."""
    tokens = side_bgtd.shape[2]
    return TensorDescriptor(side_bgtd, list(side_bgtd.shape), list(side_bgtd.stride()), [1, 1, tokens, dims])
