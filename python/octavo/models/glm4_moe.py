"""GLM 4.5 and 4.6: GLM's partly rotated heads, DeepSeek V3's experts."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.deepseek_v3 import NAMES, with_shared, without_drafters
from octavo.models.family import BlockSpec, Family, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    has_norms = bool(Reader(config.raw).get("use_qk_norm"))
    spec = replace(block_spec(config, layer), qkv_bias=config.qkv_bias, qk_norm="head" if has_norms else "none")
    return with_shared(config, spec)


FAMILY = Family(names=NAMES, block=_block, convert=without_drafters)
