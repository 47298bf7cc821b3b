"""Launches of decode steps' attention (decode_attention_fused.py): in how many shares, with how many warps, on which
scratch; and what a layer and a step bring to it.

Shape suffixes: r rows, s slots, o features of the qkv product, d head dim, f flat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton.decode_attention_fused import LOG2_E, attention_kernel, reduce_kernel
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.shared_attention import SharedScratch, choose_parts, shared_launch

TILE: Final = 64
MAX_SPLITS: Final = 16
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
    constants = _constants(layer, count, splits, joins_shared=seen is not None)
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
    full = constants | {"QK_NORM": has_norm}
    launches = []
    if seen is not None:
        launches.append(shared_launch(args, full, count, _describe(kv_cache[:, 0], heads.head_dim // 2)))
    stages, warps = choose_stages(count, rows.max_kv_len), choose_warps(count, rows.max_kv_len)
    launches.append(Launch(attention_kernel, (heads.num_kv_heads, count, splits), args, full, warps, stages))
    if splits > 1:
        reduce_args = {**row_args, **shares, **sinks, "out": out_ro}
        launches.append(Launch(reduce_kernel, (count, heads.num_heads), reduce_args, constants, 2))
    return launches


def _constants(layer: AttentionLayer, num_rows: int, splits: int, *, joins_shared: bool) -> dict[str, Any]:
    """Of both kernels."""
    heads = layer.heads
    is_full = num_rows * heads.num_kv_heads >= NUM_PROGRAMS
    return {
        "SPLITS": splits,
        "MIN_TILES": 4 if is_full else 1,
        "COUNTED": min(max(triton.next_power_of_2(num_rows), 64), MAX_COUNTED) if is_full and splits > 1 else 0,
        "TARGET": NUM_SHARES // heads.num_kv_heads,
        "PARTS": choose_parts(num_rows, heads.group, heads.num_kv_heads) if joins_shared else 0,
        "WINDOW": layer.window,
        "KV_HEADS": heads.num_kv_heads,
        "GROUP": heads.group,
        "GROUP_P2": heads.group_p2,
        "HEAD_DIM": heads.head_dim,
        "TILE": TILE,
        "SINKS": layer.sink_h is not None,
    }


def _describe(side_bgtd: Tensor, dims: int) -> TensorDescriptor:
    """K or V of a cache, read a head's block at a time, so many dims of it."""
    tokens = side_bgtd.shape[2]
    return TensorDescriptor(side_bgtd, list(side_bgtd.shape), list(side_bgtd.stride()), [1, 1, tokens, dims])
