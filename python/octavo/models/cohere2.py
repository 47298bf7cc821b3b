"""Command R7B and A: Command R's block with a window on three of four layers; the others do not rotate."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.cohere import cohere_block, cohere_scales
from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec = cohere_block(config, layer)
    return spec if spec.attention.window else replace(spec, rope=None)


FAMILY = Family(names=Names(), block=_block, scales=cohere_scales)
