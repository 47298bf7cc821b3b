"""StableLM 2 (1.6B, 3B): Llama's block with layer norms, heads rotated in part, and attention and MLP side by side if
the config says so."""

from __future__ import annotations

from dataclasses import replace

from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    reader = Reader(config.raw)
    return replace(
        block_spec(config, layer),
        norm=NormSpec(config.norm_eps, kind="layer", has_bias=True),
        qkv_bias=bool(reader.get("use_qkv_bias")),
        is_parallel=bool(reader.get("use_parallel_residual")),
    )


DEFAULTS = {
    "stablelm": {
        "max_position_embeddings": 4096,
        "norm_eps": 1e-05,
        "partial_rotary_factor": 0.25,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(), block=_block)
