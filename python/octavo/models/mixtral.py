"""Mixtral (8x7B, 8x22B): Mistral's block with a mixture of experts in every layer, in checkpoints of the old names and
of Transformers 5's."""

from __future__ import annotations

from octavo.layers.moe import ExpertNames
from octavo.models.family import Family, Names, block_spec

DEFAULTS = {
    "mixtral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "norm_eps": 1e-05,
        "rope_theta": 1_000_000.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}
"""model_type -> what its config.json means where it is silent."""

EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    gate="w1",
    up="w3",
    down="w2",
    merged_router="mlp.gate",
)
FAMILY = Family(names=Names(experts=EXPERTS), block=block_spec)
