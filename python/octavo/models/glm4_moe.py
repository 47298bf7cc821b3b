"""GLM 4.5 and 4.6: GLM's partly rotated heads, DeepSeek V3's experts."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.deepseek_v3 import NAMES, with_shared, without_drafters
from octavo.models.family import BlockSpec, Family, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    has_norms = bool(Reader(config.raw).get("use_qk_norm"))
    spec = replace(block_spec(config, layer), qkv_bias=config.qkv_bias, qk_norm="head" if has_norms else "none")
    return with_shared(config, spec)


DEFAULTS = {
    "glm4_moe": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "norm_eps": 1e-05,
        "partial_rotary_factor": 0.5,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=NAMES, block=_block, convert=without_drafters)
