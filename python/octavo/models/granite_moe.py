"""Granite 3 MoE (1B-A400M, 3B-A800M), with or without an MLP beside the experts: Granite's multipliers, Mixtral's
routing."""

from __future__ import annotations

from dataclasses import replace

from octavo.layers.moe import ExpertNames
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, SharedNames, renamed
from octavo.models.granite import granite_block, granite_scales


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    reader = Reader(config.raw)
    shared = reader.integer("shared_intermediate_size") if reader.get("shared_intermediate_size") else 0
    return replace(granite_block(config, layer), mlp_bias=False, shared_size=shared)


DEFAULTS = {
    "granitemoe": {
        "max_position_embeddings": 2048,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "granitemoeshared": {
        "max_position_embeddings": 2048,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}
"""model_type -> what its config.json means where it is silent."""

EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.experts",
    merged_router="block_sparse_moe.router",
    merged_gate_up="block_sparse_moe.input_linear.weight",
    merged_down="block_sparse_moe.output_linear.weight",
)
FAMILY = Family(
    names=Names(
        experts=EXPERTS,
        shared=SharedNames(mlp="shared_mlp", gate="", gate_up="input_linear", down="output_linear"),
    ),
    block=_block,
    scales=granite_scales,
    convert=renamed(
        (r"block_sparse_moe\.experts\.gate_up_proj$", "block_sparse_moe.input_linear.weight"),
        (r"block_sparse_moe\.experts\.down_proj$", "block_sparse_moe.output_linear.weight"),
    ),
)
