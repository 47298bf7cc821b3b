"""Qwen 1.5 and 2 with mixtures of experts (A2.7B, 57B-A14B): Qwen 2's attention; beside each mixture an MLP that every
token takes."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    reader = Reader(config.raw)
    return replace(
        block_spec(config, layer),
        qkv_bias=bool(reader.get("qkv_bias")),
        shared_size=reader.integer("shared_expert_intermediate_size"),
    )


FAMILY = Family(names=Names(), block=_block)
