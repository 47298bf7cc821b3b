"""GPT-NeoX and Pythia: attention and an MLP without a gate side by side, each after a layer norm of its own; a head's
q, k and v are next to each other in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, Tensors, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(
        block_spec(config, layer),
        norm=NormSpec(config.norm_eps, kind="layer", has_bias=True),
        is_parallel=bool(Reader(config.raw).get("use_parallel_residual")),
        has_own_norm=True,
        is_gated=False,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        mlp_bias=True,
    )


def by_part(tensor: Tensor, groups: int, per_group: int, dim: int) -> Tensor:
    """Rows of q, then k, then v, of a tensor whose heads go by groups: `per_group` of q, one of k, one of v."""
    by_group = torch.unflatten(tensor, 0, (groups, per_group + 2, dim))
    return torch.cat([part.flatten(0, 2) for part in torch.split(by_group, [per_group, 1, 1], dim=1)])


def _convert(config: NormalConfig, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        is_joined = ".query_key_value." in name
        yield name, by_part(tensor, config.num_heads, 1, config.head_dim) if is_joined else tensor


DEFAULTS = {
    "gpt_neox": {
        "use_parallel_residual": True,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "norm_eps": 1e-05,
        "partial_rotary_factor": 0.25,
        "attention_bias": True,
    },
}
"""model_type -> what its config.json means where it is silent."""

NAMES = Names(
    embed="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    layer="gpt_neox.layers.{i}",
    qkv="attention.query_key_value",
    o="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
FAMILY = Family(names=NAMES, block=_block, convert=_convert)
