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


FAMILY = Family(names=NAMES, block=_block)
