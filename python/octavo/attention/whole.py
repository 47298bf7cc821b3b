"""Attention for models whose images are seen in both directions (Gemma 3): any backend, and over it the tokens of
images once more, each with all positions of its image.

An image's tokens run in one step (`MediaSpan::is_whole`), so that all its keys are in the cache when this reads them.

Shape suffixes: t tokens of the step, h query heads, g KV heads, q an image's queries, k keys, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention.base import AttentionBackend, AttentionSpec, ForwardContext
from octavo.attention.media import WholeSpan
from octavo.kernels.reference.paged_attention import attend_row, gather_row


class WholeImageAttention:
    """See `AttentionBackend`; `inner` does what is causal."""

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner

    def prepare(self, ctx: ForwardContext) -> None:
        """See `AttentionBackend.prepare`."""
        self._inner.prepare(ctx)

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
        return self._over(spec, q_thd, ctx, sink_h, self._inner.attend(spec, q_thd, k_tgd, v_tgd, ctx, sink_h))

    def attend_cached(
        self, spec: AttentionSpec, q_thd: Tensor, ctx: ForwardContext, sink_h: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend.attend_cached`."""
        return self._over(spec, q_thd, ctx, sink_h, self._inner.attend_cached(spec, q_thd, ctx, sink_h))

    def _over(
        self, spec: AttentionSpec, q_thd: Tensor, ctx: ForwardContext, sink_h: Tensor | None, out_thd: Tensor
    ) -> Tensor:
        if ctx.media is None or not ctx.media.spans:
            return out_thd
        out_thd = out_thd.clone()
        for span in ctx.media.spans:
            tokens = slice(span.first, span.first + span.count)
            out_thd[tokens] = _attend(spec, q_thd[tokens], ctx, span, sink_h).to(out_thd.dtype)
        return out_thd


def _attend(spec: AttentionSpec, q_qhd: Tensor, ctx: ForwardContext, span: WholeSpan, sink_h: Tensor | None) -> Tensor:
    """Attention of an image's last `span.count` tokens, fp32: each sees what came before and its image, as far as a
    window reaches back."""
    first = span.end - span.count
    low = max(0, first - spec.window + 1) if spec.window else 0
    position_q = torch.arange(first, span.end, device=q_qhd.device)
    key_k = torch.arange(low, span.end, device=q_qhd.device)
    visible_qk = (key_k[None, :] <= position_q[:, None]) | (key_k[None, :] >= span.start)
    if spec.window:
        visible_qk &= key_k[None, :] > position_q[:, None] - spec.window
    table_sb = ctx.places(spec.layer).block_table_sb
    k_gkd, v_gkd = gather_row(ctx.kv_cache[spec.layer], table_sb[span.slot], low, span.end)
    return attend_row(q_qhd, k_gkd, v_gkd, visible_qk, spec.scale, spec.soft_cap, sink_h)
