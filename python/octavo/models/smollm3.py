"""SmolLM 3: Llama's block; some layers (every fourth) do not rotate."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import ModelError
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec, reader = block_spec(config, layer), Reader(config.raw)
    rotates = reader.get("no_rope_layers")  # the name says the opposite of its numbers
    if rotates is None:
        has_rope = (layer + 1) % reader.integer("no_rope_layer_interval") != 0
    elif isinstance(rotates, list) and len(rotates) == config.num_layers:
        has_rope = bool(rotates[layer])
    else:
        raise ModelError(f"config.json: no_rope_layers is {rotates!r}, not a list of {config.num_layers} numbers")
    return replace(
        spec,
        rope=spec.rope if has_rope else None,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        mlp_bias=config.mlp_bias,
    )


FAMILY = Family(names=Names(), block=_block)
