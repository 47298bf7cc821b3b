"""The attention backend in plain PyTorch: any device, any dtype, slow. What the other backends are compared with."""

from __future__ import annotations

from torch import Tensor

from octavo.attention.base import AttentionSpec, ForwardContext
from octavo.kernels.reference.kv_write import write_kv
from octavo.kernels.reference.paged_attention import paged_attention


class ReferenceAttention:
    """Loops over rows on the host; unfit for CUDA graphs."""

    def prepare(self, ctx: ForwardContext) -> None:
        """Nothing is shared between layers."""

    def attend(
        self,
        spec: AttentionSpec,
        q_thd: Tensor,
        k_tgd: Tensor,
        v_tgd: Tensor,
        ctx: ForwardContext,
        sink_h: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        write_kv(k_tgd, v_tgd, ctx.kv_cache[spec.layer], ctx.places(spec.layer).slot_mapping_t)
        return self.attend_cached(spec, q_thd, ctx, sink_h)

    def attend_cached(
        self, spec: AttentionSpec, q_thd: Tensor, ctx: ForwardContext, sink_h: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend.attend_cached`."""
        return paged_attention(
            q_thd,
            ctx.kv_cache[spec.layer],
            ctx.places(spec.layer).block_table_sb,
            ctx.row_slot_r,
            ctx.query_start_r,
            ctx.kv_len_r,
            num_rows=ctx.num_rows,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            chunk=spec.chunk,
            value_dim=spec.value_dim,
            sink_h=sink_h,
        )
