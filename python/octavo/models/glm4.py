"""GLM-4-0414 (9B, 32B): GLM-4's block with norms on both sides of attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names
from octavo.models.glm import glm_block


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(glm_block(config, layer), norms_after=True)


NAMES = Names(
    gate_up="mlp.gate_up_proj", attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"
)
FAMILY = Family(names=NAMES, block=_block)
