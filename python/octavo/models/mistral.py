"""Mistral (7B, Nemo, Small): Llama without biases, with a sliding window on every layer where the config sets one."""

from __future__ import annotations

from octavo.models.config import NormalConfig
from octavo.models.decoder import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    return block_spec(config, layer)


FAMILY = Family(names=Names(), block=_block)
