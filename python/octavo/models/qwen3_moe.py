"""Qwen 3 with mixtures of experts (30B-A3B, 235B-A22B): Qwen 3's attention; layers that the config keeps dense have a
plain MLP."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(block_spec(config, layer), qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm="head")


DEFAULTS = {
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=_block)
