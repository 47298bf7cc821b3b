"""Qwen 3 (dense): every head of q and k is normalized before the rotation; biases only if the config says so."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return replace(block_spec(config, layer), qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm="head")


FAMILY = Family(names=Names(), block=_block)
