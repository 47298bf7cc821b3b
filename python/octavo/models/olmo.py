"""OLMo (1B, 7B): Llama's block with layer norms that have no weights."""

from __future__ import annotations

from dataclasses import replace

from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names
from octavo.models.llama import llama_block

EPS = 1e-5


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(llama_block(config, layer), norm=NormSpec(EPS, kind="layer", has_weight=False))


DEFAULTS = {
    "olmo": {
        "max_position_embeddings": 2048,
        "norm_eps": 1e-05,
        "eos_token_id": 50279,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=_block)
