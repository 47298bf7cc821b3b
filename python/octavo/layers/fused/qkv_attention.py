"""Attention straight from the qkv product: one kernel for head norms, rotation and KV write, then paged attention.

Steps of decode rows only take the kernel that does all of it (decode_attention_fused), where it can.

Shape suffixes: t tokens, o features of the qkv product, d head dim, h query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention.base import ForwardContext
from octavo.kernels.reference.quantize_rows import FP8
from octavo.kernels.triton.decode_attention_launches import (
    TILE,
    AttentionLayer,
    AttentionScratch,
    DecodeRows,
    HeadShape,
    attend,
    choose_splits,
)
from octavo.kernels.triton.rotate_write import rotate_write
from octavo.kernels.triton.shared_attention import SharedScratch
from octavo.layers.attention import Attention
from octavo.layers.fused.support import HEAD_DIMS, MAX_GROUP, DeviceTraits
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import Rotary


class QkvAttention:
    """An attention layer's kernels; `fits` says of which."""

    def __init__(
        self,
        attention: Attention,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        rotary: Rotary,
        *,
        pdl: bool,
        may_decode: bool = True,
    ) -> None:
        """`may_decode`: steps of decode rows may take a kernel of their own, whose sums differ from other steps'."""
        spec = attention.spec
        self._attention, self._pdl = attention, pdl
        q_gain_d, k_gain_d = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
        self._layer = AttentionLayer(
            heads=HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim),
            scale=spec.scale,
            window=spec.window,
            q_gain_d=q_gain_d,
            k_gain_d=k_gain_d,
            norm_eps=q_norm.eps if q_norm is not None else 0.0,
            rotary_table=rotary.table,
            sink_h=attention.sink_h,
        )
        self.decodes = (
            may_decode
            and DeviceTraits.of(rotary.table.device).capability[0] == 9
            and spec.head_dim in HEAD_DIMS
            and spec.num_heads // spec.num_kv_heads <= MAX_GROUP
            and rotary.spec.rotary_dim == spec.head_dim
            and not spec.soft_cap
            and spec.is_plain
        )

    @staticmethod
    def fits(attention: Attention, q_norm: RMSNorm | None, rotary: Rotary) -> bool:
        """Whether the kernels can run the layer."""
        dim, rope = attention.spec.head_dim, rotary.spec
        return rope.rotary_dim % 2 == 0 and not rope.is_interleaved and (q_norm is None or len(q_norm.weight) == dim)

    def __call__(self, qkv_to: Tensor, cos_sin_td: Tensor, ctx: ForwardContext) -> Tensor:
        """Write K and V, attend: [t, h * d]. Overwrites `qkv`."""
        spec, layer = self._attention.spec, self._layer
        cache = ctx.kv_cache[spec.layer]
        only_decodes = ctx.num_tokens == ctx.num_rows == ctx.num_decode_rows == qkv_to.shape[0] > 0
        if (
            self.decodes
            and only_decodes
            and qkv_to.is_contiguous()
            and ctx.block_size == TILE
            and cache.dtype in (qkv_to.dtype, FP8)
        ):
            return self._decode(qkv_to, cache, ctx)
        q_thd = rotate_write(
            qkv_to,
            cos_sin_td,
            cache,
            ctx.places(spec.layer).slot_mapping_t,
            layer.q_gain_d,
            layer.k_gain_d,
            num_heads=spec.num_heads,
            norm_eps=layer.norm_eps,
            pdl=self._pdl,
        )
        return self._attention.attend_cached(q_thd, ctx).flatten(1)

    def _decode(self, qkv_to: Tensor, cache: Tensor, ctx: ForwardContext) -> Tensor:
        count, heads = ctx.num_rows, self._layer.heads
        rows = decode_rows(ctx, self._attention.spec.layer)
        out_to = torch.empty(count, heads.num_heads * heads.head_dim, dtype=qkv_to.dtype, device=qkv_to.device)
        for launch in attend(self._layer, qkv_to, cache, rows, _scratch(rows, heads, ctx), out_to):
            launch.run(pdl=self._pdl)
        return out_to


def decode_rows(ctx: ForwardContext, layer: int) -> DecodeRows:
    """The rows of a step that all decode, as a layer finds their blocks (shared ones are of the first cache group)."""
    count, table_sb = ctx.num_rows, ctx.places(layer).block_table_sb
    shared_2 = None if ctx.group(layer) else ctx.shared_2
    return DecodeRows(table_sb, ctx.row_slot_r[:count], ctx.kv_len_r[:count], ctx.max_kv_len, shared_2)


def _scratch(rows: DecodeRows, heads: HeadShape, ctx: ForwardContext) -> AttentionScratch:
    """Room for the shares of split rows, made by the step's first layer and used by all."""
    splits = choose_splits(rows.num_rows, heads.num_kv_heads, rows.max_kv_len)
    parts = rows.num_rows * heads.num_kv_heads * heads.group_p2 * splits if splits > 1 else 1
    device = rows.kv_len_r.device

    def floats(name: str, size: int) -> Tensor:
        key = f"{name}_{size}"
        if key not in ctx.scratch:
            ctx.scratch[key] = torch.empty(size, dtype=torch.float32, device=device)
        return ctx.scratch[key]

    shared = None
    if rows.shared_2 is not None:
        acc, top, total = SharedScratch.sizes(rows.num_rows, heads.num_heads, heads.num_kv_heads, heads.head_dim)
        shared = SharedScratch(floats("shared", acc), floats("shared_max", top), floats("shared_sum", total))
    return AttentionScratch(
        floats("shares", parts * heads.head_dim), floats("share_max", parts), floats("share_sum", parts), shared
    )
