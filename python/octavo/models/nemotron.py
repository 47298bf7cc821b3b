"""Nemotron and Minitron (4B to 340B): layer norms by 1 + weight, heads rotated in half, an MLP of squared ReLUs without
a gate."""

from __future__ import annotations

from dataclasses import replace

from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names
from octavo.models.llama import llama_block


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    norm = NormSpec(config.norm_eps, kind="layer", has_bias=True, shift=1.0)
    return replace(llama_block(config, layer), norm=norm, is_gated=False)


FAMILY = Family(names=Names(), block=_block)
