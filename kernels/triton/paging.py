"""Device functions that the paged kernels share: addresses within blocks, scores, types of products.

A tile is a run of TILE positions. Block ids are loaded one tile ahead of use by the callers: an id loaded inside the
iteration that needs it keeps Triton from pipelining the K and V loads behind it.

Shape suffixes: p positions of a tile, d head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.target import is_amd

LOG2_E = 1.4426950408889634


@triton.jit
def tile_blocks(table_row, tile, last_tile, length, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Block ids of a tile: one where blocks hold whole tiles, else one per position. `tile` is cut to `last_tile`,
    which is -1 where there is nothing to read."""
    tile = tl.maximum(tl.minimum(tile, last_tile), 0)
    if BLOCK % TILE == 0:
        return tl.load(table_row + tile * TILE // BLOCK)
    else:  # noqa: RET505 - Triton compiles one of two branches, not what follows a return
        position_p = tile * TILE + tl.arange(0, TILE)
        return tl.load(table_row + position_p // BLOCK, mask=position_p < length, other=0)


@triton.jit
def tile_keys(cache_head, blocks, tile, block_stride, BLOCK: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr):
    """Pointers to the keys of a tile, [p]; `cache_head` is the head's first key in block 0."""
    if BLOCK % TILE == 0:
        base = cache_head + blocks.to(tl.int64) * block_stride
        return base + ((tile * TILE) % BLOCK + tl.arange(0, TILE)) * DIM
    else:  # noqa: RET505 - Triton compiles one of two branches, not what follows a return
        offset_p = (tile * TILE + tl.arange(0, TILE)) % BLOCK
        return cache_head + blocks.to(tl.int64) * block_stride + offset_p * DIM


@triton.jit
def for_products(q, cache_ptr):
    """Queries in the type that keys, values and weights are multiplied in: their own, but fp16 for bf16 over an e4m3
    cache, whose numbers fp16 holds exactly and gets in one instruction for two."""
    if cache_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        return q.to(tl.float16)
    else:  # noqa: RET505 - Triton compiles one of two branches, not what follows a return
        return q


@triton.jit
def scaled(score, scale, cap, CAPPED: tl.constexpr):
    """Raw dot products to base-2 scores. CAPPED: scale is softmax scale / cap, and cap * log2(e) * tanh(x) is meant."""
    if CAPPED:
        return cap * (1.0 - 2.0 / (tl.exp2(score * (scale * 2.0 * 1.4426950408889634)) + 1.0))
    else:  # noqa: RET505 - Triton compiles one of two branches, not what follows a return
        return score * scale


def window_kind(window: int, chunk: int) -> tuple[int, int]:
    """(WINDOWED, `window`) as the kernels want them: 0, all is seen; 1, a sliding window; 2, runs of positions."""
    return (2, chunk) if chunk else (int(window > 0), window)


def prompt_precision(cache: torch.dtype) -> str:
    """How products of many queries with a cache multiply fp32 numbers: as three products of tf32, or on AMD's tensor
    cores, which have fp32, as they are."""
    if cache != torch.float32:
        return "tf32"
    return "ieee" if is_amd() else "tf32x3"


def score_factors(scale: float, soft_cap: float) -> tuple[float, float]:
    """(scale, cap) as `scaled` wants them."""
    if soft_cap > 0:
        return scale / soft_cap, soft_cap * LOG2_E
    return scale * LOG2_E, 0.0
