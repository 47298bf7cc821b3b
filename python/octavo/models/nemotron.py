"""Nemotron and Minitron (4B to 340B): layer norms by 1 + weight, heads rotated in half, an MLP of squared ReLUs without
a gate."""

from __future__ import annotations

from dataclasses import replace

from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names
from octavo.models.llama import llama_block


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    norm = NormSpec(config.norm_eps, kind="layer", has_bias=True, shift=1.0)
    return replace(llama_block(config, layer), norm=norm, is_gated=False)


DEFAULTS = {
    "nemotron": {
        "eos_token_id": 3,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-05,
        "hidden_act": "relu2",
        "partial_rotary_factor": 0.5,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=_block)
