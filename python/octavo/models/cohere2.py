"""Command R7B and A: Command R's block with a window on three of four layers; the others do not rotate."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.cohere import cohere_block, cohere_scales
from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec = cohere_block(config, layer)
    return spec if spec.attention.window else replace(spec, rope=None)


DEFAULTS = {
    "cohere2": {
        "max_position_embeddings": 8192,
        "norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "eos_token_id": 255001,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=_block, scales=cohere_scales)
