"""ERNIE 4.5 (0.3B): Llama's block, neighbouring dims rotated together. Its mixtures of experts (ernie4_5_moe.py) start
from it."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, block_spec


def ernie_block(config: NormalConfig, layer: int) -> BlockSpec:
    """What all ERNIE 4.5 have."""
    spec, has_biases = block_spec(config, layer), bool(Reader(config.raw).get("use_bias"))
    assert spec.rope is not None
    return replace(
        spec,
        rope=replace(spec.rope, is_interleaved=True),
        qkv_bias=has_biases,
        o_bias=has_biases,
        mlp_bias=has_biases,
    )


DEFAULTS = {
    "ernie4_5": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "norm_eps": 1e-05,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "head_dim": 128,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=ernie_block)
