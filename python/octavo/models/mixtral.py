"""Mixtral (8x7B, 8x22B): Mistral's block with a mixture of experts in every layer, in checkpoints of the old names and
of Transformers 5's."""

from __future__ import annotations

from octavo.layers.moe import ExpertNames
from octavo.models.family import Family, Names, block_spec

EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    gate="w1",
    up="w3",
    down="w2",
    merged_router="mlp.gate",
)
FAMILY = Family(names=Names(experts=EXPERTS), block=block_spec)
