"""DeepSeek V2 and V2 Lite: V3's attention; experts chosen by a softmax, of the best groups in the larger one."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import ModelError
from octavo.layers.moe import Routing
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.deepseek_v3 import NAMES, expert_groups, latent_block, shared_size
from octavo.models.family import BlockSpec, Family


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec, reader = latent_block(config, layer), Reader(config.raw)
    spec = replace(spec, mlp_bias=config.mlp_bias)
    if spec.experts is None:
        return spec
    method = reader.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"config.json: topk_method {method!r} is not greedy or group_limited_greedy")
    has_groups = method == "group_limited_greedy"
    groups, top_groups = expert_groups(reader, spec.experts) if has_groups else (1, 1)
    routing = Routing(
        scale=reader.number("routed_scaling_factor"),
        groups=groups,
        top_groups=top_groups,
        is_exact=True,
    )
    return replace(spec, experts=replace(spec.experts, routing=routing), shared_size=shared_size(reader, spec.experts))


DEFAULTS = {
    "deepseek_v2": {
        "max_position_embeddings": 2048,
        "num_experts": 64,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_interleave": True,
        "topk_method": "greedy",
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=NAMES, block=_block)
