"""Seed-OSS (36B): Llama's block with biases of q, k and v."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names
from octavo.models.llama import llama_block


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(llama_block(config, layer), o_bias=bool(Reader(config.raw).get("attention_out_bias")))


DEFAULTS = {
    "seed_oss": {
        "max_position_embeddings": 524288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=_block)
