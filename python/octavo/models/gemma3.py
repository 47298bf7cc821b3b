"""Gemma 3, text (270M, 1B): Gemma 2's block with norms of q and k heads instead of caps; most layers have a window, and
rotate with plain frequencies of a base of their own."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig, RopeConfig
from octavo.models.description import rotary_spec
from octavo.models.family import BlockSpec, Family
from octavo.models.gemma import gemma_block, gemma_scales
from octavo.models.gemma2 import NAMES
from octavo.models.gemma_config import gemma_config


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec = replace(gemma_block(config, layer), norms_after=True, qk_norm="head")
    if not spec.attention.window:
        return spec
    return replace(spec, rope=rotary_spec(RopeConfig(theta=gemma_config(config).local_theta), config.head_dim))


FAMILY = Family(names=NAMES, block=_block, scales=gemma_scales)
