"""Bamba (9B): Mamba 2 layers, a few of attention with heads rotated in half, an MLP after each."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, layer_kind
from octavo.models.layer_kinds import RECURRENT
from octavo.models.llama import llama_block
from octavo.models.space_layers import SPACE_DEFAULTS, SPACE_NAMES, space_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec = llama_block(config, layer)
    return replace(spec, recurrent=space_spec(config), rope=None) if layer_kind(config, layer) == RECURRENT else spec


DEFAULTS = {
    "bamba": {
        **SPACE_DEFAULTS,
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "norm_eps": 1e-05,
        "partial_rotary_factor": 0.5,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(
    names=SPACE_NAMES,
    block=_block,
)
