"""Falcon-H1 (0.5B to 34B): in every layer attention and a Mamba 2 layer read the same and are added; an MLP follows.
Its many multipliers are of products, and become part of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Scales, Tensors
from octavo.models.llama import llama_block
from octavo.models.space_layers import SPACE_DEFAULTS, SPACE_NAMES, space_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec, reader = llama_block(config, layer), Reader(config.raw)
    gating: Literal["before the norm", "after the norm", "no norm"] = "no norm"
    if reader.get("mamba_rms_norm"):
        gating = "after the norm" if reader.get("mamba_norm_before_gate") else "before the norm"
    recurrent = replace(space_spec(config), gating=gating, has_out_bias=bool(reader.get("projectors_bias")))
    attention = replace(spec.attention, layer=2 * layer)
    return replace(spec, attention=attention, recurrent=recurrent, is_beside=True)


def _numbers(reader: Reader, name: str, count: int) -> list[float]:
    value = reader.get(name) or [1.0] * count
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ModelError(f"config.json: {name} is {value!r}, not {count} numbers")
    return [float(number) for number in value]


def _factors(config: NormalConfig) -> dict[str, tuple[Tensor | float, Tensor | float]]:
    """Product -> what its weights and its biases are multiplied by."""
    reader, spec = Reader(config.raw), space_spec(config)
    read, given = reader.number("attention_in_multiplier"), reader.number("attention_out_multiplier")
    gate, down = _numbers(reader, "mlp_multipliers", 2)
    shared = spec.num_groups * spec.state_dim
    sizes = torch.tensor([spec.shape.inner, spec.shape.inner, shared, shared, spec.num_heads])
    parts = torch.tensor(_numbers(reader, "ssm_multipliers", 5)).repeat_interleave(sizes)
    key, state = reader.number("key_multiplier"), reader.number("ssm_out_multiplier")
    return {
        "self_attn.q_proj": (read, 1.0),
        "self_attn.k_proj": (read * key, key),
        "self_attn.v_proj": (read, 1.0),
        "self_attn.o_proj": (given, given),
        "mamba.in_proj": (reader.number("ssm_in_multiplier") * parts[:, None], parts),
        "mamba.out_proj": (state, state),
        "feed_forward.gate_proj": (gate, gate),
        "feed_forward.down_proj": (down, down),
    }


def _convert(config: NormalConfig, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    factors = _factors(config)
    for name, tensor in tensors:
        product, _, kind = name.rpartition(".")
        found = factors.get(".".join(product.split(".")[-2:]))
        if found is not None and tensor.element_size() == 1:
            raise ModelError(f"{name} is in 8 bits, whose multipliers this version can't apply; use 16-bit weights")
        yield name, tensor if found is None else (tensor.float() * found[kind == "bias"]).to(tensor.dtype)


def _scales(config: NormalConfig) -> Scales:
    reader = Reader(config.raw)
    return Scales(embedding=reader.number("embedding_multiplier"), logits=reader.number("lm_head_multiplier"))


_MULTIPLIERS = (
    "attention_in_multiplier",
    "attention_out_multiplier",
    "key_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
    "embedding_multiplier",
    "lm_head_multiplier",
)
DEFAULTS: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        **{name: value for name, value in SPACE_DEFAULTS.items() if name != "layer_types"},
        **dict.fromkeys(_MULTIPLIERS, 1.0),
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 8,
        "norm_eps": 1e-05,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(
    names=SPACE_NAMES,
    block=_block,
    scales=_scales,
    convert=_convert,
)
