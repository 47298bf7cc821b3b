"""Apertus (8B, 70B): Llama's block with norms of q and k heads; an MLP without a gate, whose activation is learned."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec = replace(block_spec(config, layer), qkv_bias=config.qkv_bias, o_bias=config.o_bias)
    return replace(spec, qk_norm="head", is_gated=False)


DEFAULTS = {
    "apertus": {
        "max_position_embeddings": 65536,
        "norm_eps": 1e-5,
        "rope_theta": 12_000_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "xielu",
        "eos_token_id": 2,
    },
}
"""model_type -> what its config.json means where it is silent."""

NAMES = Names(input_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
FAMILY = Family(names=NAMES, block=_block)
