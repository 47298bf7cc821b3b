"""dots.llm1: Qwen 3's attention, DeepSeek V3's experts."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.deepseek_v3 import NAMES, with_shared
from octavo.models.family import BlockSpec, Family, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec = replace(block_spec(config, layer), qkv_bias=config.qkv_bias, o_bias=config.o_bias, qk_norm="head")
    return with_shared(config, spec)


FAMILY = Family(names=NAMES, block=_block)
