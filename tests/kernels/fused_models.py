"""Decoders of real models' sizes for the fused kernels, with random weights or none at all (meta device)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.attention.base import AttentionSpec, ForwardContext
from octavo.kernels.reference.quantize_rows import quantize_rows
from octavo.kernels.reference.squares import SIDE, quantize_squares
from octavo.layers.fused.base import BlockWeights, DecoderWeights, ExpertWeights, GatedWeights, Weights
from octavo.layers.linear import Form

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Sizes:
    """A model's dimensions."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int
    qk_norm: bool
    tied: bool = False
    experts: int = 0
    """Of a mixture in each layer (`inner` is one's), `top_k` of them for a token; 0: plain MLPs."""
    top_k: int = 8
    is_gpt_oss: bool = False
    """All products have biases, attention has sinks, experts' activations are clamped."""


def raw_config(sizes: Sizes) -> dict[str, Any]:
    """The config.json of a plain model of these sizes, but for its architecture."""
    return {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": sizes.tied,
        "eos_token_id": 2,
    }


LLAMA_8B = Sizes(4096, 14336, 32, 8, 128, 128256, 32, False)
QWEN3_8B = Sizes(4096, 12288, 32, 8, 128, 151936, 36, True)
QWEN3_06B = Sizes(1024, 3072, 16, 8, 128, 151936, 28, True, tied=True)
QWEN3_30B_A3B = Sizes(2048, 768, 32, 4, 128, 151936, 48, True, experts=128)
GPT_OSS_20B = Sizes(2880, 2880, 64, 8, 64, 201088, 24, False, experts=32, top_k=4, is_gpt_oss=True)


def make_weights(
    sizes: Sizes, *, layers: int, device: str, max_len: int, bias: bool = False, form: Form = "wide"
) -> DecoderWeights:
    """Random weights: products keep their input's size, gains are near 1. `form`: of matrices of blocks (experts')."""

    def matrix(n: int, k: int) -> Tensor:
        return torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_(0, k**-0.5)

    bias |= sizes.is_gpt_oss

    def gain(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.bfloat16, device=device).uniform_(0.5, 1.5)

    def product(n: int, k: int) -> Weights:
        bias_n = gain(n) if bias else None
        if form == "wide":
            return Weights(matrix(n, k), bias_n)
        quantize, share = (quantize_squares, SIDE) if form == "squares" else (quantize_rows, 0)
        number_nk, scale_n = quantize(matrix(n, k))
        return Weights(number_nk, bias_n, scale_n, share)

    def mlp() -> GatedWeights | ExpertWeights:
        if not sizes.experts:
            return GatedWeights(product(2 * sizes.inner, sizes.hidden), product(sizes.hidden, sizes.inner))
        gate_up = matrix(sizes.experts * 2 * sizes.inner, sizes.hidden).view(sizes.experts, -1, sizes.hidden)
        down = matrix(sizes.experts * sizes.hidden, sizes.inner).view(sizes.experts, -1, sizes.inner)
        router, scales = matrix(sizes.experts, sizes.hidden), (None, None)
        if form != "wide":
            quantize = quantize_squares if form == "squares" else quantize_rows
            (gate_up, first), (down, second) = (quantize(w.flatten(0, 1)) for w in (gate_up, down))
            gate_up, down = (n.view(sizes.experts, -1, n.shape[1]) for n in (gate_up, down))
            scales = tuple(s.view(sizes.experts, -1, *s.shape[1:]) for s in (first, second))
        if not sizes.is_gpt_oss:
            return ExpertWeights(router, gate_up, down, sizes.top_k, True, *scales)
        biases = gain(sizes.experts), matrix(sizes.experts, gate_up.shape[1]), matrix(sizes.experts, sizes.hidden)
        return ExpertWeights(router, gate_up, down, sizes.top_k, True, *scales, *biases, 7.0, 1.702)

    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    blocks = [
        BlockWeights(
            attention=AttentionSpec(
                i,
                sizes.heads,
                sizes.kv_heads,
                sizes.head_dim,
                sizes.head_dim**-0.5,
                window=128 if sizes.is_gpt_oss and i % 2 == 0 else 0,
            ),
            norm_eps=1e-6,
            input_gain_m=gain(sizes.hidden),
            qkv=product(query + 2 * key, sizes.hidden),
            q_gain_d=gain(sizes.head_dim) if sizes.qk_norm else None,
            k_gain_d=gain(sizes.head_dim) if sizes.qk_norm else None,
            o=product(sizes.hidden, query),
            mlp_gain_m=gain(sizes.hidden),
            mlp=mlp(),
            sink_h=gain(sizes.heads) if sizes.is_gpt_oss else None,
        )
        for i in range(layers)
    ]
    embed = torch.empty(sizes.vocab, sizes.hidden, dtype=torch.bfloat16, device=device).normal_()
    head = embed if sizes.tied else matrix(sizes.vocab, sizes.hidden)
    half = torch.arange(sizes.head_dim // 2, device=device) / (sizes.head_dim // 2)
    angle = torch.arange(max_len, device=device)[:, None] * 10000.0 ** (-half)
    table = torch.cat((angle.cos(), angle.sin()), dim=-1).float()
    return DecoderWeights(embed, blocks, gain(sizes.hidden), head, table)


def make_context(
    sizes: Sizes, lengths: list[int], *, layers: int, device: str, max_kv_len: int | None = None
) -> ForwardContext:
    """Decode rows of given lengths in shuffled slots and blocks; the cache is random."""
    needed = [-(-length // BLOCK_SIZE) for length in lengths]
    num_blocks, rows = sum(needed) + 1, len(lengths)
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    table_sb = torch.zeros(rows + 3, max(needed) + 4, dtype=torch.int32)
    slots = torch.randperm(rows + 3)[:rows]
    for slot, count in zip(slots.tolist(), needed, strict=True):
        table_sb[slot, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    kv_len_r = torch.tensor(lengths, dtype=torch.int32)
    position_t = kv_len_r.long() - 1
    block_t = table_sb[slots, position_t // BLOCK_SIZE].long()
    shape = (num_blocks, 2, sizes.kv_heads, BLOCK_SIZE, sizes.head_dim)
    move = partial(Tensor.to, device=device)
    return ForwardContext(
        kv_cache=[torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(layers)],
        block_table_sb=move(table_sb),
        row_slot_r=move(slots.int()),
        query_start_r=move(torch.arange(rows + 1, dtype=torch.int32)),
        kv_len_r=move(kv_len_r),
        position_t=move(position_t),
        slot_mapping_t=move(block_t * BLOCK_SIZE + position_t % BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        num_rows=rows,
        num_decode_rows=rows,
        num_tokens=rows,
        max_query_len=1,
        max_kv_len=max_kv_len or max(lengths),
    )
