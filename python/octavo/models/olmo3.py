"""OLMo 3: OLMo 2 with a window on three of four layers, whose rotations are not stretched."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig, RopeConfig
from octavo.models.description import rotary_spec
from octavo.models.family import BlockSpec, Family
from octavo.models.olmo2 import NAMES, olmo_block


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec = olmo_block(config, layer)
    if not spec.attention.window:
        return spec
    return replace(spec, rope=rotary_spec(RopeConfig(theta=config.local_theta or config.rope.theta), config.head_dim))


DEFAULTS = {
    "olmo3": {
        "max_position_embeddings": 2048,
        "norm_eps": 1e-05,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=NAMES, block=_block)
