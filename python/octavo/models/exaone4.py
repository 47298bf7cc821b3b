"""EXAONE 4 (1.2B, 32B): OLMo 2's norms, over heads; where layers have windows, those without do not rotate."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, block_spec
from octavo.models.olmo2 import NAMES


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec = replace(block_spec(config, layer), qk_norm="head", norms_before=False, norms_after=True)
    has_windows = any(config.layer_windows)
    return replace(spec, rope=None) if has_windows and not spec.attention.window else spec


DEFAULTS = {
    "exaone4": {
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "norm_eps": 1e-05,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=NAMES, block=_block)
