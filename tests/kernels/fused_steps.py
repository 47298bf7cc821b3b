"""Random inputs for the fused decode kernels, on any device: decode rows over a shuffled cache, weight matrices.

Shape suffixes: r rows, s slots, b blocks, n output features, k input features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.reference.decode_attention_fused import attend
from octavo.kernels.triton.decode_attention_launches import TILE, AttentionLayer, DecodeRows, HeadShape


@dataclass
class AttentionCase:
    """One layer's attention over rows of given lengths."""

    layer: AttentionLayer
    rows: DecodeRows
    kv_cache: Tensor
    qkv_ro: Tensor

    @property
    def heads(self) -> HeadShape:
        return self.layer.heads

    def expected(self, kv_cache: Tensor) -> Tensor:
        """[r, heads * dims] by the reference, which writes the newest keys and values into a cache like the case's."""
        layer, rows, heads = self.layer, self.rows, self.layer.heads
        attended_rhd = attend(
            self.qkv_ro, kv_cache, rows.block_table_sb, rows.row_slot_r, rows.kv_len_r, layer.rotary_table,
            layer.q_gain_d, layer.k_gain_d, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads,
            scale=layer.scale, window=layer.window, norm_eps=layer.norm_eps, sink_h=layer.sink_h,
        )  # fmt: skip
        return attended_rhd.flatten(1)


def make_attention(
    lengths: list[int],
    heads: HeadShape,
    *,
    window: int = 0,
    qk_norm: bool = False,
    has_sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    sharing: Sequence[int] = (),
    num_shared: int = 0,
) -> AttentionCase:
    """Rows of random slots with random blocks; every cache entry is a number, also those that no row owns. Rows
    `sharing` begin with the same `num_shared` blocks, and the step says so (0: it has nothing to say, but could)."""
    torch.manual_seed(seed)
    num_slots, width = len(lengths) + 3, max(lengths) // TILE + 2
    needed = [-(-length // TILE) for length in lengths]
    free = (torch.randperm(sum(needed)) + 1).tolist()
    table_sb = torch.zeros(num_slots, width, dtype=torch.int32)
    slots = torch.randperm(num_slots)[: len(lengths)]
    for slot, count in zip(slots.tolist(), needed, strict=True):
        table_sb[slot, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    shared_2 = None
    if sharing:
        leader = int(slots[sharing[0]])
        table_sb[slots[list(sharing)], :num_shared] = table_sb[leader, :num_shared].clone()
        shared_2 = torch.tensor([leader, num_shared], dtype=torch.int32, device=device)
    dim = heads.head_dim

    def random(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device).to(kind)

    angle = torch.arange(max(lengths) + 1)[:, None] * 10000.0 ** (-torch.arange(dim // 2) / (dim // 2))
    gains = [1 + 0.2 * random(dim) if qk_norm else None for _ in range(2)]
    layer = AttentionLayer(
        heads, dim**-0.5, window, gains[0], gains[1], 1e-6, torch.cat((angle.cos(), angle.sin()), -1).to(device),
        2.0 + random(heads.num_heads) if has_sinks else None,
    )  # fmt: skip
    rows = DecodeRows(
        table_sb.to(device),
        slots.to(device, torch.int32),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        max(lengths),
        shared_2,
    )
    cache = random(sum(needed) + 1, 2, heads.num_kv_heads, TILE, dim)
    return AttentionCase(layer, rows, cache, random(len(lengths), (heads.num_heads + 2 * heads.num_kv_heads) * dim))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())
