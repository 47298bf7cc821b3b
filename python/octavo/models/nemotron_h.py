"""Nemotron-H (4B to 56B) and Nemotron 3 Nano: blocks of one part each, a Mamba 2 layer, attention without rotations, an
MLP of squared ReLUs without a gate, or a mixture of such MLPs with DeepSeek V3's routing."""

from __future__ import annotations

import math
from dataclasses import replace

from octavo.layers.moe import ExpertNames
from octavo.layers.state_space import StateSpaceSpec
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.deepseek_v3 import with_shared
from octavo.models.family import BlockSpec, Family, Names, SharedNames, block_spec, layer_kind, without
from octavo.models.layer_kinds import ATTENTION, RECURRENT
from octavo.models.space_layers import checked


def _space_spec(config: NormalConfig) -> StateSpaceSpec:
    reader = Reader(config.raw)
    return checked(
        StateSpaceSpec(
            hidden_size=config.hidden_size,
            num_heads=reader.integer("mamba_num_heads"),
            head_dim=reader.integer("mamba_head_dim"),
            state_dim=reader.integer("ssm_state_size"),
            num_groups=reader.integer("n_groups"),
            taps=reader.integer("conv_kernel"),
            norm_eps=config.norm_eps,
            has_bias=bool(reader.get("use_bias")),
            has_conv_bias=bool(reader.get("use_conv_bias")),
            step_limits=(reader.number("time_step_min"), math.inf),
        )
    )


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec, kind = block_spec(config, layer), layer_kind(config, layer)
    kept = sum(before in (RECURRENT, ATTENTION) for before in config.layer_kinds[:layer])
    spec = replace(
        spec,
        attention=replace(spec.attention, layer=kept),
        rope=None,
        recurrent=_space_spec(config) if kind == RECURRENT else None,
        has_mixer=kind in (RECURRENT, ATTENTION),
        has_mlp=kind not in (RECURRENT, ATTENTION),
        is_gated=False,
        mlp_bias=config.mlp_bias,
    )
    if spec.experts is None:
        return spec
    spec = with_shared(config, replace(spec, experts=replace(spec.experts, is_gated=False)))
    return replace(spec, shared_size=Reader(config.raw).integer("moe_shared_expert_intermediate_size"))


DEFAULTS = {
    "nemotron_h": {
        "layer_types": None,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "norm_eps": 1e-05,
        "hidden_act": "relu2",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_min": 0.001,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(
    names=Names(
        embed="backbone.embeddings",
        final_norm="backbone.norm_f",
        layer="backbone.layers.{i}",
        input_norm="norm",
        mlp_norm="norm",
        q="mixer.q_proj",
        k="mixer.k_proj",
        v="mixer.v_proj",
        o="mixer.o_proj",
        up="mixer.up_proj",
        down="mixer.down_proj",
        recurrent="mixer",
        experts=ExpertNames(
            router="mixer.gate",
            merged_router="mixer.gate",
            experts="mixer.experts",
            choice_bias="mixer.gate.e_score_correction_bias",
        ),
        shared=SharedNames(mlp="mixer.shared_experts", gate=""),
    ),
    convert=without("mtp."),
    block=_block,
)
