"""StarCoder 2 (3B, 7B, 15B): layer norms, biases everywhere, an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    has_biases = bool(Reader(config.raw).get("use_bias"))
    return replace(
        block_spec(config, layer),
        norm=NormSpec(config.norm_eps, kind="layer", has_bias=True),
        qkv_bias=has_biases,
        o_bias=has_biases,
        mlp_bias=has_biases,
        is_gated=False,
    )


FAMILY = Family(names=Names(up="mlp.c_fc", down="mlp.c_proj"), block=_block)
