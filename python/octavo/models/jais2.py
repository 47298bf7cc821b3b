"""Jais 2 (8B, 70B): layer norms, biases everywhere, an MLP of squared ReLUs without a gate."""

from __future__ import annotations

from dataclasses import replace

from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names
from octavo.models.llama import llama_block


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    norm = NormSpec(config.norm_eps, kind="layer", has_bias=True)
    return replace(llama_block(config, layer), norm=norm, is_gated=False)


DEFAULTS = {
    "jais2": {
        "eos_token_id": 150024,
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "hidden_act": "relu2",
        "attention_bias": True,
        "mlp_bias": True,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=_block)
