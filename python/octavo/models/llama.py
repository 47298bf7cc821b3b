"""Llama 2, 3 and everything that calls itself LlamaForCausalLM (SmolLM2, TinyLlama, Yi …).

Biases are the config's (`attention_bias` on all four attention products, `mlp_bias` on all three of the MLP).
"""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names, block_spec


def llama_block(config: NormalConfig, layer: int) -> BlockSpec:
    """Llama's block with the config's biases."""
    return replace(block_spec(config, layer), qkv_bias=config.qkv_bias, o_bias=config.o_bias, mlp_bias=config.mlp_bias)


FAMILY = Family(names=Names(), block=llama_block)
