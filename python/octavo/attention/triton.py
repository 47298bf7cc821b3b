"""The attention backend of CUDA devices: Triton kernels of octavo.kernels.triton. Safe in CUDA graph captures.

Rows of one token go through the split-KV decode kernel, the others through the prefill kernel. In deterministic mode
all go through the latter, which walks a row's cache in one order however many of its tokens are in the step.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from octavo.attention.base import AttentionSpec, ForwardContext, dense_heads
from octavo.kernels.triton.handles import only_compiling
from octavo.kernels.triton.interpreter import mend
from octavo.kernels.triton.kv_write import write_kv
from octavo.kernels.triton.paged_decode import paged_decode, plan_decode
from octavo.kernels.triton.paged_latent import is_narrow, paged_latent, plan_latent
from octavo.kernels.triton.paged_prefill import paged_prefill
from octavo.kernels.triton.target import is_small


class PromptAttention(Protocol):
    """What may take the prefill kernel's place."""

    def fits(self, spec: AttentionSpec, cache: Tensor) -> bool:
        """Whether it can run the layer."""

    def attend(self, spec: AttentionSpec, q_thd: Tensor, cache: Tensor, ctx: ForwardContext) -> Tensor:
        """Attention of the rows from ctx.num_decode_rows on, K and V written; q holds their tokens: [t, h, d]."""


class TritonAttention:
    """Paged attention with online softmax in fp32; bf16, fp16 and (slowly) fp32. `prompts` runs what layers it fits,
    but for decode rows."""

    def __init__(self, *, deterministic: bool = False, prompts: PromptAttention | None = None) -> None:
        mend()
        self._deterministic = deterministic
        self._prompts = prompts

    def prepare(self, ctx: ForwardContext) -> None:
        """Scratch of an earlier step is of no use to this one (a graph's pool may have taken it)."""
        ctx.scratch.clear()

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
        write_kv(
            dense_heads(k_tgd), dense_heads(v_tgd), ctx.kv_cache[spec.layer], ctx.places(spec.layer).slot_mapping_t
        )
        return self.attend_cached(spec, dense_heads(q_thd), ctx, sink_h)

    def attend_cached(
        self, spec: AttentionSpec, q_thd: Tensor, ctx: ForwardContext, sink_h: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend.attend_cached`. A token's heads are dense in q; tokens may lie apart."""
        cache = ctx.kv_cache[spec.layer]
        counted = ctx.num_decode_rows_1 is not None
        prompts = self._prompts
        if prompts is not None and (counted or sink_h is not None or not prompts.fits(spec, cache)):
            prompts = None
        only_prompts = not ctx.num_decode_rows and q_thd.shape[0] == ctx.num_tokens
        if prompts is not None and only_prompts and not only_compiling():
            return prompts.attend(spec, q_thd, cache, ctx)
        make = torch.zeros if counted else torch.empty  # who knows which tokens have a row
        out_thd = make((*q_thd.shape[:2], spec.out_dim), dtype=q_thd.dtype, device=q_thd.device)
        if q_thd.shape[0] > ctx.num_tokens:
            out_thd[ctx.num_tokens :].zero_()
        decodes = ctx.num_decode_rows
        if self._deterministic and counted:
            rows = 0, ctx.num_rows
            self._prefill(spec, q_thd, ctx, out_thd, sink_h, rows=rows, max_query_len=ctx.max_query_len)
            return out_thd
        if decodes and self._deterministic:
            self._prefill(spec, q_thd, ctx, out_thd, sink_h, rows=(0, decodes), max_query_len=1)
        elif decodes:
            self._decode(spec, q_thd, ctx, out_thd, sink_h)
        if ctx.num_rows > decodes and prompts is not None:
            if not only_compiling():
                out_thd[decodes : ctx.num_tokens] = prompts.attend(spec, q_thd[decodes : ctx.num_tokens], cache, ctx)
        elif ctx.num_rows > decodes:
            rows = decodes, ctx.num_rows
            self._prefill(spec, q_thd, ctx, out_thd, sink_h, rows=rows, max_query_len=ctx.max_query_len)
        return out_thd

    def _prefill(
        self,
        spec: AttentionSpec,
        q_thd: Tensor,
        ctx: ForwardContext,
        out_thd: Tensor,
        sink_h: Tensor | None,
        *,
        rows: tuple[int, int],
        max_query_len: int,
    ) -> None:
        count_1 = ctx.num_decode_rows_1 if rows[0] else None
        if spec.value_dim:
            _latent(spec, q_thd, ctx, out_thd, rows, max_query_len, count_1, is_decode=False)
            return
        paged_prefill(
            q_thd,
            ctx.kv_cache[spec.layer],
            ctx.places(spec.layer).block_table_sb,
            ctx.row_slot_r,
            ctx.query_start_r,
            ctx.kv_len_r,
            out_thd,
            first_row=rows[0],
            num_rows=rows[1],
            max_query_len=max_query_len,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            chunk=spec.chunk,
            sink_h=sink_h,
            first_row_1=count_1,
        )

    def _decode(
        self, spec: AttentionSpec, q_thd: Tensor, ctx: ForwardContext, out_thd: Tensor, sink_h: Tensor | None
    ) -> None:
        rows, cache = ctx.num_decode_rows, ctx.kv_cache[spec.layer]
        if spec.value_dim:
            _latent(spec, q_thd, ctx, out_thd, (0, rows), 1, ctx.num_decode_rows_1, is_decode=True)
            return
        sizes = rows, spec.num_heads, spec.num_kv_heads, spec.head_dim, cache.element_size(), ctx.max_kv_len
        plan = plan_decode(*sizes, small=is_small(cache.device))
        part, stat = _scratch(plan.scratch_sizes(rows, spec.num_kv_heads), ctx, q_thd.device)
        paged_decode(
            q_thd,
            cache,
            ctx.places(spec.layer).block_table_sb,
            ctx.row_slot_r,
            ctx.kv_len_r,
            out_thd,
            plan,
            part,
            stat,
            num_rows=rows,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            chunk=spec.chunk,
            sink_h=sink_h,
            num_rows_1=ctx.num_decode_rows_1,
        )


def _latent(
    spec: AttentionSpec,
    q_thd: Tensor,
    ctx: ForwardContext,
    out_thl: Tensor,
    rows: tuple[int, int],
    max_query_len: int,
    count_1: Tensor | None,
    *,
    is_decode: bool,
) -> None:
    """Rows [rows[0], rows[1]) of a layer whose cache holds no V."""
    cache = ctx.kv_cache[spec.layer]
    plan = plan_latent(
        rows[1] if is_decode else 0,
        spec.num_heads,
        spec.value_dim,
        cache.element_size(),
        ctx.max_kv_len,
        is_decode=is_decode,
        narrow=is_narrow(cache.device),
    )
    part, stat = _scratch(plan.scratch_sizes(rows[1]), ctx, q_thd.device)
    paged_latent(
        q_thd,
        cache,
        ctx.places(spec.layer).block_table_sb,
        ctx.row_slot_r,
        ctx.query_start_r,
        ctx.kv_len_r,
        out_thl,
        plan,
        part,
        stat,
        first_row=rows[0],
        num_rows=rows[1],
        max_query_len=max_query_len,
        scale=spec.scale,
        is_decode=is_decode,
        count_1=count_1,
    )


def _scratch(sizes: tuple[int, int], ctx: ForwardContext, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for partial results, made by the first layer that needs it and used by all with the same sizes."""
    tensors = []
    for name, size in zip(("part", "stat"), sizes, strict=True):
        key = f"{name}_{size}"
        if key not in ctx.scratch:
            # A launch without splits gets one float, so that it has an address.
            ctx.scratch[key] = torch.empty(max(size, 1), dtype=torch.float32, device=device)
        tensors.append(ctx.scratch[key])
    return tensors[0], tensors[1]
