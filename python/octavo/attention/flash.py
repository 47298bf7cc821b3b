"""Attention of prompts by FlashAttention 3 (Shah et al. 2024), where its package is installed: `tokenspeed-fa3`, or any
other that brings the module `flash_attn_interface`. Hopper only. Decode rows stay with Octavo's own kernels.

Shape suffixes: t tokens, r rows, b blocks of a row, h query heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from octavo.attention.base import AttentionSpec, ForwardContext
from octavo.attention.triton import TritonAttention
from octavo.errors import ConfigError

MODULE = "flash_attn_interface"
HEAD_DIMS = (64, 128, 256)
"""What the package is built for."""
DTYPES = (torch.bfloat16, torch.float16)


class FlashPrompts:
    """See `octavo.attention.triton.PromptAttention`."""

    def __init__(self) -> None:
        try:
            module = import_module(MODULE)
        except ImportError as error:
            raise ConfigError(
                f"--attention-backend flash needs FlashAttention 3 ({error}): pip install tokenspeed-fa3, or use auto",
                "attention_backend",
            ) from error
        self._attend: Callable[..., Any] = module.flash_attn_with_kvcache

    def fits(self, spec: AttentionSpec, cache: Tensor) -> bool:
        """Heads that the package knows, without a soft cap (it is built without)."""
        return spec.is_plain and spec.head_dim in HEAD_DIMS and not spec.soft_cap and cache.dtype in DTYPES

    def attend(self, spec: AttentionSpec, q_thd: Tensor, cache: Tensor, ctx: ForwardContext) -> Tensor:
        """Rows from ctx.num_decode_rows on: q's tokens are theirs; [t, h, d]."""
        pages_rb, starts_r = _pages(spec, ctx)
        window = (spec.window - 1, 0) if spec.window else (-1, -1)
        found: Tensor = self._attend(
            q_thd,
            cache[:, 0].transpose(1, 2),
            cache[:, 1].transpose(1, 2),
            cache_seqlens=ctx.kv_len_r[ctx.num_decode_rows : ctx.num_rows],
            page_table=pages_rb,
            cu_seqlens_q=starts_r,
            max_seqlen_q=ctx.max_query_len,
            softmax_scale=spec.scale,
            causal=True,
            window_size=window,
            num_splits=1,
        )
        return found


def _pages(spec: AttentionSpec, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
    """(blocks [r, b] of the step's prompts, where their tokens start [r + 1]), made by a group's first layer."""
    pages = f"flash_pages_{ctx.group(spec.layer)}"
    if pages not in ctx.scratch:
        first, last = ctx.num_decode_rows, ctx.num_rows
        ctx.scratch[pages] = ctx.places(spec.layer).block_table_sb[ctx.row_slot_r[first:last].long()]
        ctx.scratch["flash_starts"] = (ctx.query_start_r[first : last + 1] - first).int()
    return ctx.scratch[pages], ctx.scratch["flash_starts"]


def flash_attention() -> TritonAttention:
    """The backend. ConfigError where the package is missing."""
    return TritonAttention(prompts=FlashPrompts())
