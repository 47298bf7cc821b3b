"""OLMoE (1B-7B): Mixtral's block with norms of q and k over all heads; experts' weights need not add up to 1."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(block_spec(config, layer), qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm="all")


DEFAULTS = {
    "olmoe": {
        "max_position_embeddings": 4096,
        "norm_eps": 1e-05,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "intermediate_size": 2048,
        "eos_token_id": 50279,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=_block)
