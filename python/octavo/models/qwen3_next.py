"""Qwen 3-Next (80B-A3B) and the text of Qwen 3.5: three layers in four are gated delta nets, the others attend with
gates of heads and rotate a quarter; mixtures of experts with one that every token takes, or MLPs; norms by 1 + weight.
Qwen 3.5's checkpoints have recurrent products by what they make, Qwen 3-Next's by head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo.layers.gated_delta import GatedDeltaSpec
from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, Tensors, block_spec, layer_kind
from octavo.models.layer_kinds import RECURRENT


def delta_spec(config: NormalConfig) -> GatedDeltaSpec:
    """Of all recurrent layers."""
    reader = Reader(config.raw)
    return GatedDeltaSpec(
        hidden_size=config.hidden_size,
        num_key_heads=reader.integer("linear_num_key_heads"),
        num_value_heads=reader.integer("linear_num_value_heads"),
        key_dim=reader.integer("linear_key_head_dim"),
        value_dim=reader.integer("linear_value_head_dim"),
        taps=reader.integer("linear_conv_kernel_dim"),
        norm_eps=config.norm_eps,
    )


def delta_block(config: NormalConfig, layer: int) -> BlockSpec:
    """Of Qwen 3-Next and 3.5; the latter's small ones have no experts."""
    spec, reader = block_spec(config, layer), Reader(config.raw)
    is_recurrent = layer_kind(config, layer) == RECURRENT
    return replace(
        spec,
        norm=NormSpec(config.norm_eps, shift=1.0),
        recurrent=delta_spec(config) if is_recurrent else None,
        rope=None if is_recurrent else spec.rope,
        has_gates=not is_recurrent,
        qk_norm="none" if is_recurrent else "head",
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        shared_size=0 if spec.experts is None else reader.integer("shared_expert_intermediate_size"),
    )


def _runs(tensor: Tensor, outer: int, sizes: Sequence[int]) -> list[Tensor]:
    """Of a tensor whose rows are `outer` times (some, some …), the rows of each kind. Scales of blocks of rows are
    dealt alike; those that blocks of several kinds share go to all of them."""
    rows = tensor.shape[0] if tensor.ndim else 1
    block = outer * sum(sizes) // rows
    if rows == 1 or any(size % block for size in sizes):
        return [tensor] * len(sizes)
    parts = torch.unflatten(tensor, 0, (outer, -1)).split_with_sizes([size // block for size in sizes], 1)
    return [part.flatten(0, 1) for part in parts]


def _convert(config: NormalConfig, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Query products have, head by head, its query and its gate; recurrent products of Qwen 3-Next, key head by key
    head, all that belongs to it."""
    spec = delta_spec(config)
    each = spec.num_value_heads // spec.num_key_heads
    keys, values = spec.key_dim, each * spec.value_dim
    for name, tensor in tensors:
        if name.startswith("mtp."):  # a drafter beside the model
            continue
        if ".self_attn.q_proj." in name:
            query, gate = _runs(tensor, config.num_heads, [config.head_dim] * 2)
            yield name, query
            yield name.replace("q_proj", "q_gate"), gate
        elif ".in_proj_qkvz." in name:
            q, k, v, z = _runs(tensor, spec.num_key_heads, [keys, keys, values, values])
            yield name.replace("qkvz", "qkv"), q if q is tensor else torch.cat((q, k, v))
            yield name.replace("qkvz", "z"), z
        elif ".in_proj_ba." in name:
            for part, letter in zip(_runs(tensor, spec.num_key_heads, [each] * 2), "ba", strict=True):
                yield name.replace("in_proj_ba", f"in_proj_{letter}"), part
        else:
            yield name, tensor


_SIZES = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    "num_key_value_heads": 2,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
DEFAULTS = {
    "qwen3_next": {**_SIZES, **_EXPERTS, "num_experts": 512},
    "qwen3_5_text": {**_SIZES, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {**_SIZES, **_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=delta_block, convert=_convert)
