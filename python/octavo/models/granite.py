"""Granite 3: Llama with multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import ModelError
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, Scales, block_spec


def granite_block(config: NormalConfig, layer: int) -> BlockSpec:
    """Of Granite 3; its mixtures of experts (granite_moe.py) start from it."""
    spec, reader = block_spec(config, layer), Reader(config.raw)
    return replace(
        spec,
        attention=replace(spec.attention, scale=reader.number("attention_multiplier", 1.0)),
        residual_scale=reader.number("residual_multiplier", 1.0),
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        mlp_bias=config.mlp_bias,
    )


def granite_scales(config: NormalConfig) -> Scales:
    """Of all Granites."""
    reader = Reader(config.raw)
    divisor = reader.number("logits_scaling", 1.0)
    if not divisor:
        raise ModelError("config.json: logits_scaling is 0; logits are divided by it")
    return Scales(embedding=reader.number("embedding_multiplier", 1.0), logits=1.0 / divisor)


DEFAULTS = {
    "granite": {
        "max_position_embeddings": 2048,
        "norm_eps": 1e-06,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=granite_block, scales=granite_scales)
