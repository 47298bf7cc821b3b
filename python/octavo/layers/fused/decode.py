"""Decode steps with fused kernels: embedding, 5 kernels a layer (6 where attention is split), final norm; and the head.

A layer: qkv product | attention with head norms, rotation and KV write | [its reduction] | o + residual | MLP (mlp.py:
gate_up + silu | down + residual, or experts). Norms live in the products around them
(octavo.kernels.triton.skinny_linear). Products with fp8 weights quantize their rows first where there is more than one
(one small kernel each).

All steps share one set of buffers, whose addresses CUDA graphs may keep; nothing is allocated in `forward`.

Shape suffixes: t tokens (one a row), s sampled rows, m model dim, o features of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.attention.base import ForwardContext
from octavo.kernels.triton.decode_attention_fused import attention_kernel
from octavo.kernels.triton.decode_attention_launches import (
    TILE,
    AttentionLayer,
    AttentionScratch,
    DecodeRows,
    HeadShape,
    attend,
)
from octavo.kernels.triton.embed_norm import embed, final_norm
from octavo.kernels.triton.launch import Launch, compile_together
from octavo.kernels.triton.skinny_linear import (
    QuantizedRows,
    ResidualStream,
    SkinnyLinear,
    SplitScratch,
    add_residual,
    quantized,
    scaled_store,
    store,
    supports,
)
from octavo.kernels.triton.skinny_table import MAX_ROWS, bucket_for
from octavo.layers.fused.base import BlockWeights, DecoderWeights
from octavo.layers.fused.mlp import FusedMLP, MLPScratch, MLPStep, make_linear, make_mlp
from octavo.layers.fused.qkv_attention import decode_rows


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """A block's products and attention, ready to launch."""

    cache: int
    """Index into `ForwardContext.kv_cache`."""
    attention: AttentionLayer
    norm_eps: float
    mlp_gain_m: Tensor
    qkv: SkinnyLinear
    o: SkinnyLinear
    mlp: FusedMLP

    @classmethod
    def make(cls, block: BlockWeights, rotary_table: Tensor, rows: QuantizedRows | None) -> FusedBlock:
        """Choose the products' configurations. `rows` is for the fp8 ones."""
        spec = block.attention
        heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        attention = AttentionLayer(
            heads, spec.scale, spec.window, block.q_gain_d, block.k_gain_d, block.norm_eps, rotary_table,
            block.sink_h,
        )  # fmt: skip
        return cls(
            cache=spec.layer,
            attention=attention,
            norm_eps=block.norm_eps,
            mlp_gain_m=block.mlp_gain_m,
            qkv=make_linear("qkv", block.qkv, rows),
            o=make_linear("o", block.o, rows),
            mlp=make_mlp(block.mlp, rows),
        )


@dataclass(frozen=True, slots=True)
class Buffers:
    """Everything between kernels, for MAX_ROWS rows."""

    stream: ResidualStream
    qkv_to: Tensor
    attended_to: Tensor
    hidden_tm: Tensor
    mlp: MLPScratch
    split: SplitScratch
    attention: AttentionScratch

    @classmethod
    def allocate(cls, blocks: list[FusedBlock], width: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        """For blocks of equal shapes (some may be fp8 and some not; MLPs of one kind are equal)."""
        block = blocks[0]
        heads = block.attention.heads
        split = SplitScratch.allocate([x for b in blocks for x in (b.qkv, b.o, *b.mlp.linears())], device)

        def rows(features: int) -> Tensor:
            return torch.zeros(MAX_ROWS, features, dtype=dtype, device=device)

        return cls(
            stream=ResidualStream.allocate(width, dtype, device),
            qkv_to=rows(block.qkv.n),
            attended_to=rows(block.o.k),
            hidden_tm=rows(width),
            mlp=MLPScratch.allocate([b.mlp for b in blocks], split, dtype, device),
            split=split,
            attention=AttentionScratch.allocate(heads, MAX_ROWS, device),
        )


class FusedDecode:
    """See `octavo.layers.fused.base.DecodeKernels`. The decoder and device must have no `support.obstacle`."""

    def __init__(self, weights: DecoderWeights) -> None:
        self._embed_vm, self._final_gain_m = weights.embed_vm, weights.final_gain_m
        self._input_gains = [block.input_gain_m for block in weights.blocks]
        rows = _quantized_rows(weights)
        self._blocks = [FusedBlock.make(block, weights.rotary_table, rows) for block in weights.blocks]
        width, dtype, device = weights.embed_vm.shape[1], weights.embed_vm.dtype, weights.embed_vm.device
        self._buffers = Buffers.allocate(self._blocks, width, dtype, device)
        vocab_size = weights.head_vm.shape[0]
        can_score = supports("head", vocab_size, width)
        self._head = SkinnyLinear.make("head", weights.head_vm, None) if can_score else None
        self._compiled: set[tuple[int, tuple[Any, ...]]] = set()

    def accepts(self, ctx: ForwardContext) -> bool:
        """Steps of at most MAX_ROWS rows that all decode, over blocks of TILE tokens."""
        only_decodes = ctx.num_tokens == ctx.num_rows == ctx.num_decode_rows
        return only_decodes and 0 < ctx.num_rows <= MAX_ROWS and ctx.block_size == TILE

    def forward(self, token_id_t: Tensor, ctx: ForwardContext) -> Tensor:
        """See `DecodeKernels.forward`. The first step of a kind compiles its kernels, in parallel."""
        launches = self.launches(token_id_t, ctx)
        attention = next(launch for launch in launches if launch.kernel is attention_kernel)
        kind = bucket_for(ctx.num_rows), attention.variant  # all that varies among steps of one bucket
        if kind not in self._compiled:
            compile_together(launches)
            self._compiled.add(kind)
        for launch in launches:
            launch.run()
        return self._buffers.hidden_tm[: ctx.num_rows]

    def launches(self, token_id_t: Tensor, ctx: ForwardContext) -> list[Launch]:
        """The step's kernels in order."""
        count, buffers = ctx.num_rows, self._buffers
        found = [embed(token_id_t, self._embed_vm, self._input_gains[0], buffers.stream)]
        next_gains = [*self._input_gains[1:], self._final_gain_m]
        partials = 1
        for block, next_gain_m in zip(self._blocks, next_gains, strict=True):
            rows = decode_rows(ctx, block.cache)
            found += self._block(block, next_gain_m, ctx.kv_cache[block.cache], rows, partials)
            partials = block.mlp.num_partials(count)
        eps = self._blocks[-1].norm_eps
        return [*found, final_norm(buffers.stream, self._final_gain_m, eps, buffers.hidden_tm[:count])]

    def _block(
        self, block: FusedBlock, next_gain_m: Tensor, kv_cache: Tensor, rows: DecodeRows, partials: int
    ) -> list[Launch]:
        """One block; `partials` sums of squares a row come with its input, `next_gain_m` is of the norm after it."""
        count, buffers, eps = rows.num_rows, self._buffers, block.norm_eps
        stream = buffers.stream
        qkv_to, attended_to = buffers.qkv_to[:count], buffers.attended_to[:count]
        return [
            *quantized(block.qkv, stream.gained_mn[:count]),
            scaled_store(block.qkv, stream, qkv_to, partials=partials, epilogue="store", eps=eps),
            *attend(block.attention, qkv_to, kv_cache, rows, buffers.attention, attended_to),
            *quantized(block.o, attended_to),
            add_residual(block.o, attended_to, stream, block.mlp_gain_m, buffers.split),
            *block.mlp.launches(MLPStep(stream, buffers.mlp, count, block.o.num_tiles(count), eps, next_gain_m)),
        ]

    def accepts_logits(self, hidden_sm: Tensor) -> bool:
        """At most MAX_ROWS rows, if the vocabulary's size has a configuration."""
        return self._head is not None and 0 < hidden_sm.shape[0] <= MAX_ROWS

    def logits(self, hidden_sm: Tensor) -> Tensor:
        """See `DecodeKernels.logits`."""
        assert self._head is not None
        logits_sv = torch.empty(hidden_sm.shape[0], self._head.n, dtype=torch.float32, device=hidden_sm.device)
        store(self._head, hidden_sm, logits_sv, self._buffers.stream).run()
        return logits_sv


def _quantized_rows(weights: DecoderWeights) -> QuantizedRows | None:
    """Room for the widest rows that an fp8 product reads; None where there is none."""
    products = [product for b in weights.blocks for product in b.products()]
    widths = [product.weight_nk.shape[1] for product in products if product.scale_n is not None]
    return QuantizedRows.allocate(max(widths), weights.embed_vm.device) if widths else None
