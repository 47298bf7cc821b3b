"""GLM 4.7 Flash (30B-A3B): DeepSeek V3's block with sizes of its own."""

from __future__ import annotations

from octavo.models.deepseek_v3 import NAMES, deepseek_block, without_drafters
from octavo.models.family import Family

DEFAULTS = {
    "glm4_moe_lite": {
        "max_position_embeddings": 202752,
        "num_key_value_heads": 20,
        "norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_interleave": True,
        "eos_token_id": 1,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=NAMES, block=deepseek_block, convert=without_drafters)
