"""GLM-4-0414 (9B, 32B): GLM-4's block with norms on both sides of attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names
from octavo.models.glm import glm_block


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(glm_block(config, layer), norms_after=True)


DEFAULTS = {
    "glm4": {
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

NAMES = Names(
    gate_up="mlp.gate_up_proj", attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"
)
FAMILY = Family(names=NAMES, block=_block)
