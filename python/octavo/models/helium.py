"""Helium (2B): Llama's block, neighbouring dims rotated together."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names
from octavo.models.llama import llama_block


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec = llama_block(config, layer)
    assert spec.rope is not None
    return replace(spec, rope=replace(spec.rope, is_interleaved=True), o_bias=False)


DEFAULTS = {
    "helium": {
        "max_position_embeddings": 4096,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "norm_eps": 1e-8,
        "rope_theta": 100_000.0,
        "eos_token_id": 2,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=_block)
