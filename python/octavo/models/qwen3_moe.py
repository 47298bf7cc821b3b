"""Qwen 3 with mixtures of experts (30B-A3B, 235B-A22B): Qwen 3's attention; layers that the config keeps dense have a
plain MLP."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(block_spec(config, layer), qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm="head")


FAMILY = Family(names=Names(), block=_block)
