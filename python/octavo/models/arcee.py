"""Arcee (AFM 4.5B): Llama's block, an MLP of squared ReLUs without a gate."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names
from octavo.models.llama import llama_block


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(llama_block(config, layer), is_gated=False)


DEFAULTS = {
    "arcee": {
        "eos_token_id": 128001,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-05,
        "hidden_act": "relu2",
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=_block)
