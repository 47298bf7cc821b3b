"""Phi 3.5 MoE (16 x 3.8B): layer norms with biases, Mixtral's experts chosen by SparseMixer, and logits with a bias."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import ModelError
from octavo.layers.moe import Routing
from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig, RopeConfig
from octavo.models.config_reader import Reader
from octavo.models.description import rotary_spec
from octavo.models.family import BlockSpec, Family, Names, block_spec
from octavo.models.mixtral import EXPERTS


def _rope(config: NormalConfig) -> RopeConfig:
    """Of longrope, the factor of both lengths is given. ModelError: they differ, which no table of angles has."""
    given = config.raw.get("rope_parameters") or config.raw.get("rope_scaling") or {}
    factors = {float(given[name]) for name in ("short_mscale", "long_mscale") if given.get(name) is not None}
    if len(factors) > 1:
        raise ModelError("config.json: short_mscale and long_mscale differ; this version knows one for all lengths")
    return replace(config.rope, attention_factor=factors.pop()) if factors else config.rope


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec = block_spec(config, layer)
    if spec.experts is None:
        raise ModelError("config.json: a Phi MoE of no num_local_experts, or of another model_type than phimoe")
    routing = Routing(jitter=Reader(config.raw).number("router_jitter_noise"))
    return replace(
        spec,
        norm=NormSpec(config.norm_eps, kind="layer", has_bias=True),
        rope=rotary_spec(_rope(config), config.head_dim),
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        experts=replace(spec.experts, routing=routing),
    )


DEFAULTS = {
    "phimoe": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "norm_eps": 1e-05,
        "rope_theta": 1_000_000.0,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(
    names=Names(experts=EXPERTS),
    block=_block,
    has_head_bias=lambda config: bool(config.raw.get("lm_head_bias")),
)
