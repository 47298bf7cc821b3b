"""Hunyuan V1 (0.5B to 7B; A13B with mixtures of experts and an MLP beside them): Llama's block with norms of q and k
heads after the rotation, whose base a config may stretch (`alpha`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octavo.layers.moe import ExpertNames, Routing
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.description import rotary_spec
from octavo.models.family import BlockSpec, Family, Names, SharedNames
from octavo.models.llama import llama_block


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    raw, dim = Reader(config.raw).raw, config.head_dim
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters")
    alpha = parameters.get("alpha") if isinstance(parameters, Mapping) else None
    rope = config.rope
    if rope.type == "dynamic" and alpha:
        rope = replace(rope, type="default", theta=rope.theta * float(alpha) ** (dim / (dim - 2)))
    spec = replace(
        llama_block(config, layer), mlp_bias=False, rope=rotary_spec(rope, dim), qk_norm="head", norms_rotated=True
    )
    if spec.experts is None:
        return spec
    routing = Routing(renormalize=True, is_exact=True)
    return replace(spec, experts=replace(spec.experts, routing=routing), shared_size=config.intermediate_size)


DEFAULTS = {
    "hunyuan_v1_dense": {
        "max_position_embeddings": 2048,
        "norm_eps": 1e-05,
    },
    "hunyuan_v1_moe": {
        "max_position_embeddings": 2048,
        "norm_eps": 1e-05,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
    },
}
"""model_type -> what its config.json means where it is silent."""

NAMES = Names(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    experts=ExpertNames(router="mlp.gate.wg", merged_router="mlp.gate.wg"),
    shared=SharedNames(mlp="mlp.shared_mlp", gate=""),
)
FAMILY = Family(names=NAMES, block=_block)
