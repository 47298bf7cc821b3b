"""Granite 4 (Micro to Small): Granite's multipliers; Mamba 2 layers and a few of attention, rotated or not; after each
a mixture of experts beside an MLP, or the MLP alone."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, layer_kind
from octavo.models.granite import granite_block, granite_scales
from octavo.models.granite_moe import FAMILY as GRANITE_MOE
from octavo.models.layer_kinds import RECURRENT
from octavo.models.space_layers import SPACE_DEFAULTS, space_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec, reader = granite_block(config, layer), Reader(config.raw)
    shared = reader.integer("shared_intermediate_size")
    if spec.experts is None:
        spec = replace(spec, intermediate_size=shared, mlp_bias=False)
    else:
        spec = replace(spec, shared_size=shared, mlp_bias=False)
    if layer_kind(config, layer) == RECURRENT:
        return replace(spec, recurrent=space_spec(config), rope=None)
    return spec if reader.get("position_embedding_type") == "rope" else replace(spec, rope=None)


DEFAULTS = {
    "granitemoehybrid": {
        **SPACE_DEFAULTS,
        "max_position_embeddings": 2048,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "shared_intermediate_size": 1024,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(
    names=replace(
        GRANITE_MOE.names, gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear", recurrent="mamba"
    ),
    block=_block,
    scales=granite_scales,
    convert=GRANITE_MOE.convert,
)
