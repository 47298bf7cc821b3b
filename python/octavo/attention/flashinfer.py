"""Attention of prompts by FlashInfer (Ye et al. 2025), where its package is installed: `flashinfer-python`, which
compiles its kernels with nvcc when they are first needed. Decode rows, and steps in a CUDA graph, stay with Octavo's
own kernels: FlashInfer plans a step on the host, which waits for the device once a step and cache group.

Shape suffixes: t tokens, r rows, b blocks of a row, n blocks of all rows, h query heads, d head dim.
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

MODULE = "flashinfer"
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES = 128 << 20
"""What its documentation recommends."""


class FlashInferPrompts:
    """See `octavo.attention.triton.PromptAttention`. A wrapper of the package keeps the plan of one kind of layer."""

    def __init__(self) -> None:
        try:
            module = import_module(MODULE)
        except ImportError as error:
            raise ConfigError(
                f"--attention-backend flashinfer needs FlashInfer ({error}): pip install flashinfer-python, or use "
                "auto",
                "attention_backend",
            ) from error
        self._make: Callable[..., Any] = module.BatchPrefillWithPagedKVCacheWrapper
        self._wrappers: dict[tuple[Any, ...], Any] = {}
        self._workspace: Tensor | None = None

    def fits(self, spec: AttentionSpec, cache: Tensor) -> bool:
        """Heads that the package knows, in a cache of 16-bit numbers."""
        return spec.is_plain and spec.head_dim in HEAD_DIMS and cache.dtype in DTYPES

    def attend(self, spec: AttentionSpec, q_thd: Tensor, cache: Tensor, ctx: ForwardContext) -> Tensor:
        """Rows from ctx.num_decode_rows on: q's tokens are theirs; [t, h, d]."""
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        kind = (ctx.group(spec.layer), *heads, spec.scale, spec.window, spec.soft_cap, q_thd.dtype, cache.dtype)
        if kind not in self._wrappers:
            self._wrappers[kind] = self._make(self._scratch(q_thd.device), "HND")
        wrapper, planned = self._wrappers[kind], f"flashinfer_plan_{kind}"
        if planned not in ctx.scratch:
            starts_r, ends_r, blocks_n, last_r = _pages(spec, ctx)
            wrapper.plan(
                starts_r,
                ends_r,
                blocks_n,
                last_r,
                *heads,
                ctx.block_size,
                causal=True,
                sm_scale=spec.scale,
                window_left=spec.window - 1 if spec.window else -1,
                logits_soft_cap=spec.soft_cap or None,
                q_data_type=q_thd.dtype,
                kv_data_type=cache.dtype,
            )
            ctx.scratch[planned] = blocks_n
        found: Tensor = wrapper.run(q_thd.contiguous(), cache)
        return found

    def _scratch(self, device: torch.device) -> Tensor:
        """One for all wrappers: layers run one after another."""
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspace


def _pages(spec: AttentionSpec, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the step's prompts: where their tokens start and, in the list of their blocks, where each row's do [r + 1],
    the list [n], and how many places of its last block a row uses [r]."""
    first, last = ctx.num_decode_rows, ctx.num_rows
    kv_len_r = ctx.kv_len_r[first:last]
    count_r = (kv_len_r + ctx.block_size - 1) // ctx.block_size
    table_rb = ctx.places(spec.layer).block_table_sb[ctx.row_slot_r[first:last].long()]
    place_b = torch.arange(table_rb.shape[1], device=table_rb.device)
    ends_r = torch.nn.functional.pad(count_r.cumsum(0), (1, 0)).int()
    starts_r = (ctx.query_start_r[first : last + 1] - ctx.query_start_r[first]).int()
    return starts_r, ends_r, table_rb[place_b < count_r[:, None]], kv_len_r - (count_r - 1) * ctx.block_size


def flashinfer_attention() -> TritonAttention:
    """The backend. ConfigError where the package is missing."""
    return TritonAttention(prompts=FlashInferPrompts())
