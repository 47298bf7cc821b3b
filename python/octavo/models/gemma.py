"""Gemma 1 (2B, 7B): norms by 1 + weight, scaled embeddings, MLPs with gelu. Gemma 2 and 3 build on it."""

from __future__ import annotations

from dataclasses import replace

from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names, Scales, block_spec
from octavo.models.gemma_config import NORM_SHIFT, gemma_config


def gemma_block(config: NormalConfig, layer: int) -> BlockSpec:
    """What all Gemmas have."""
    spec, gemma = block_spec(config, layer), gemma_config(config)
    return replace(
        spec,
        attention=replace(spec.attention, scale=gemma.attention_scale, soft_cap=gemma.attention_cap),
        norm=NormSpec(config.norm_eps, shift=NORM_SHIFT),
        hidden_act=gemma.activation,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
    )


def gemma_scales(config: NormalConfig) -> Scales:
    """Of all Gemmas."""
    gemma = gemma_config(config)
    return Scales(embedding=gemma.embedding_scale, logit_cap=gemma.logit_cap)


FAMILY = Family(names=Names(), block=gemma_block, scales=gemma_scales)
