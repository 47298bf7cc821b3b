"""Random steps: rows of various lengths over a shuffled paged cache, with NaN wherever nothing may be read.

Shape suffixes: t tokens, r rows, s slots, b blocks, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.base import AttentionSpec, ForwardContext


@dataclass
class Step:
    """A context and what one layer gets."""

    ctx: ForwardContext
    spec: AttentionSpec
    q_thd: Tensor
    k_tgd: Tensor
    v_tgd: Tensor
    sink_h: Tensor | None = None

    def clone_ctx(self) -> ForwardContext:
        """The same step over its own copy of the cache."""
        ctx = ForwardContext(**{name: getattr(self.ctx, name) for name in ForwardContext.__slots__})
        ctx.kv_cache = [cache.clone() for cache in self.ctx.kv_cache]
        ctx.scratch = {}
        return ctx


def fill(
    cache: Tensor, table: Tensor, slots: list[int], rows: list[tuple[int, int]], generator: torch.Generator
) -> tuple[list[int], list[int], list[int]]:
    """Give each row random blocks and random K and V before its queries; (positions, places, query starts)."""
    block_size = cache.shape[3]
    free = (torch.randperm(cache.shape[0] - 1, generator=generator) + 1).tolist()
    position, mapping, starts = [], [], [0]
    for slot, (queries, length) in zip(slots, rows, strict=True):
        blocks = [free.pop() for _ in range(-(-length // block_size))]
        table[slot, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for index in range(length - queries):
            shape = (*cache.shape[1:3], cache.shape[4])
            cache[blocks[index // block_size], :, :, index % block_size] = torch.randn(shape, generator=generator)
        own = range(length - queries, length)
        position += own
        mapping += [blocks[i // block_size] * block_size + i % block_size for i in own]
        starts.append(starts[-1] + queries)
    return position, mapping, starts


def make_step(
    rows: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    soft_cap: float = 0.0,
    chunk: int = 0,
    value_dim: int = 0,
    has_sinks: bool = False,
    seed: int = 0,
    poison: float = float("nan"),
    device: str = "cpu",
) -> Step:
    """A step of rows (query length, kv length), rows of one token first.

    Cache positions that belong to no row hold `poison`; the places of this step's own tokens do until they are written.
    """
    rows = sorted(rows, key=lambda row: row[0] != 1)
    generator = torch.Generator().manual_seed(seed)
    num_slots = len(rows) + 3
    slots = torch.randperm(num_slots, generator=generator)[: len(rows)].tolist()
    num_blocks = 2 + sum(-(-kv // block_size) for _, kv in rows)
    spec = AttentionSpec(0, heads, kv_heads, dim, dim**-0.5, window, soft_cap, chunk, value_dim)
    cache = torch.full(spec.cache_shape(num_blocks, block_size), poison)
    cache[0] = 0
    table = torch.zeros(num_slots, max(kv for _, kv in rows) // block_size + 2, dtype=torch.int32)
    position, mapping, starts = fill(cache, table, slots, rows, generator)
    tokens = starts[-1]

    def random(count: int) -> Tensor:
        return torch.randn(tokens, count, dim, generator=generator).to(device, dtype)

    def ints(values: list[int], kind: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    ctx = ForwardContext(
        kv_cache=[cache.to(device, dtype)],
        block_table_sb=table.to(device),
        row_slot_r=ints(slots),
        query_start_r=ints(starts),
        kv_len_r=ints([kv for _, kv in rows]),
        position_t=ints(position, torch.int64),
        slot_mapping_t=ints(mapping, torch.int64),
        block_size=block_size,
        num_rows=len(rows),
        num_decode_rows=sum(queries == 1 for queries, _ in rows),
        num_tokens=tokens,
        max_query_len=max(queries for queries, _ in rows),
        max_kv_len=max(kv for _, kv in rows),
    )
    sink_h = torch.randn(heads, generator=generator).to(device, dtype) if has_sinks else None
    return Step(ctx, spec, random(heads), random(kv_heads), random(kv_heads), sink_h)
