"""Command R: attention and MLP side by side after one layer norm, neighbouring dims rotated together, scaled logits.
Command R7B and A (cohere2.py) build on it."""

from __future__ import annotations

from dataclasses import replace

from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, Scales, block_spec


def cohere_block(config: NormalConfig, layer: int) -> BlockSpec:
    """What all Command R have."""
    spec = block_spec(config, layer)
    assert spec.rope is not None
    return replace(
        spec,
        rope=replace(spec.rope, is_interleaved=True),
        norm=NormSpec(config.norm_eps, kind="layer"),
        is_parallel=True,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
    )


def cohere_scales(config: NormalConfig) -> Scales:
    """Of all Command R."""
    return Scales(logits=Reader(config.raw).number("logit_scale"))


DEFAULTS = {
    "cohere": {
        "max_position_embeddings": 8192,
        "norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "eos_token_id": 255001,
        "rope_theta": 500_000.0,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=cohere_block, scales=cohere_scales)
