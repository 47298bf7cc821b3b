"""dots.llm1: Qwen 3's attention, DeepSeek V3's experts."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.deepseek_v3 import NAMES, with_shared
from octavo.models.family import BlockSpec, Family, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec = replace(block_spec(config, layer), qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm="head")
    return with_shared(config, spec)


DEFAULTS = {
    "dots1": {
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "num_experts": None,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=NAMES, block=_block)
