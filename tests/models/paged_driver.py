"""Runs a model over packed rows with a paged cache whose blocks are handed out in shuffled order: a worker in small."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.attention.base import AttentionBackend, ForwardContext, make_backend
from octavo.models.base import CausalLM
from octavo.worker.kv_cache import layer_dtype


class PagedDriver:
    """Slots 0 .. num_slots - 1, each with `max_len` positions; block 0 stays the null block."""

    def __init__(
        self,
        model: CausalLM,
        *,
        num_slots: int = 4,
        max_len: int = 80,
        block_size: int = 8,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        backend: AttentionBackend | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model, self.block_size, self.device = model, block_size, device
        self.backend = backend or make_backend("reference")
        model.set_attention_backend(self.backend)
        per_slot = -(-max_len // block_size)
        blocks = list(range(1, num_slots * per_slot + 1))
        random.Random(seed).shuffle(blocks)
        self.block_table_sb = torch.tensor(blocks, dtype=torch.int32, device=device).view(num_slots, per_slot)
        self.kv_cache = [
            torch.full(
                spec.cache_shape(len(blocks) + 1, block_size), 7.0, dtype=layer_dtype(spec, dtype), device=device
            )
            for spec in model.attention_specs
        ]
        self.lengths = [0] * num_slots

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Append tokens to slots, [(slot, token ids)]; logits [t, v] of all tokens. Rows of one token come first."""
        ctx, token_id_t = self.context(rows)
        self.backend.prepare(ctx)
        with torch.inference_mode():
            return self.model.logits(self.model.forward(token_id_t, ctx.position_t, ctx))

    def context(self, rows: Sequence[tuple[int, Sequence[int]]]) -> tuple[ForwardContext, Tensor]:
        """The step that appends `rows`, and its token ids [t]."""
        slots, tokens, positions, mapping, starts, lengths = [], [], [], [], [0], []
        for slot, ids in rows:
            for i in range(self.lengths[slot], self.lengths[slot] + len(ids)):
                positions.append(i)
                block = int(self.block_table_sb[slot, i // self.block_size])
                mapping.append(block * self.block_size + i % self.block_size)
            self.lengths[slot] += len(ids)
            slots.append(slot)
            tokens += ids
            starts.append(len(tokens))
            lengths.append(self.lengths[slot])
        ctx = ForwardContext(
            kv_cache=self.kv_cache,
            block_table_sb=self.block_table_sb,
            row_slot_r=self._ints(slots, torch.int32),
            query_start_r=self._ints(starts, torch.int32),
            kv_len_r=self._ints(lengths, torch.int32),
            position_t=self._ints(positions, torch.int64),
            slot_mapping_t=self._ints(mapping, torch.int64),
            block_size=self.block_size,
            num_rows=len(rows),
            num_decode_rows=sum(len(ids) == 1 for _, ids in rows),
            num_tokens=len(tokens),
            max_query_len=max(len(ids) for _, ids in rows),
            max_kv_len=max(lengths),
        )
        return ctx, self._ints(tokens, torch.int32)

    def _ints(self, values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
