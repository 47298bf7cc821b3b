"""Qwen 1.5 and 2 with mixtures of experts (A2.7B, 57B-A14B): Qwen 2's attention; beside each mixture an MLP that every
token takes."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    reader = Reader(config.raw)
    return replace(
        block_spec(config, layer),
        qkv_bias=bool(reader.get("qkv_bias")),
        shared_size=reader.integer("shared_expert_intermediate_size"),
    )


DEFAULTS = {
    "qwen2_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=_block)
