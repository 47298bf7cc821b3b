"""Qwen 2 and 2.5: q, k and v have biases, nothing else has; some layers may have a sliding window."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(block_spec(config, layer), qkv_bias=True)


FAMILY = Family(names=Names(), block=_block)
