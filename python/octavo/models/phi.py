"""Phi 1, 1.5 and 2: attention and an MLP without a gate side by side after one layer norm, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(
        block_spec(config, layer),
        norm=NormSpec(config.norm_eps, kind="layer", has_bias=True),
        is_parallel=True,
        is_gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


DEFAULTS = {
    "phi": {
        "max_position_embeddings": 2048,
        "norm_eps": 1e-05,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(
    names=Names(final_norm="model.final_layernorm", o="self_attn.dense", up="mlp.fc1", down="mlp.fc2"),
    block=_block,
    has_head_bias=lambda config: True,
)
