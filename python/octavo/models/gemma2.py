"""Gemma 2 (2B, 9B, 27B): Gemma's block with norms on both sides of attention and MLP, capped scores and logits, and a
window on every second layer."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names
from octavo.models.gemma import gemma_block, gemma_scales


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(gemma_block(config, layer), norms_after=True)


NAMES = Names(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
FAMILY = Family(names=NAMES, block=_block, scales=gemma_scales)
