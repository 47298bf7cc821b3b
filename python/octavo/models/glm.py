"""GLM-4 9B (chat-hf, of Transformers' class Glm): biases of q, k and v; neighbouring dims of half a head are rotated;
gate and up are one tensor. GLM-4-0414 (glm4.py) builds on it."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names, block_spec


def glm_block(config: NormalConfig, layer: int) -> BlockSpec:
    """What all GLM-4 have."""
    spec = block_spec(config, layer)
    assert spec.rope is not None
    return replace(spec, rope=replace(spec.rope, is_interleaved=True), qkv_bias=config.qkv_bias)


DEFAULTS = {
    "glm": {
        "max_position_embeddings": 131072,
        "norm_eps": 1.5625e-07,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "eos_token_id": [151329, 151336, 151338],
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(gate_up="mlp.gate_up_proj"), block=glm_block)
