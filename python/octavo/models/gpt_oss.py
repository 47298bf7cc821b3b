"""gpt-oss (20B, 120B): attention sinks, windows on every other layer, experts with biases and a clamped activation, in
checkpoints of plain numbers or of MXFP4, which become plain ones here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.layers.moe import Clamped, ExpertNames, Routing
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, Tensors, block_spec
from octavo.models.mxfp4 import dequantize


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec, reader = block_spec(config, layer), Reader(config.raw)
    if spec.experts is None:
        raise ModelError(f"config.json: model_type {config.model_type!r} is not gpt_oss, which its architecture is of")
    experts = replace(
        spec.experts,
        routing=Routing(renormalize=True, has_bias=True),
        has_biases=True,
        clamped=Clamped(reader.number("swiglu_limit"), reader.number("swiglu_alpha")),
    )
    return replace(spec, experts=experts, has_sinks=True, qkv_bias=config.qkv_bias, o_bias=config.o_bias)


def _convert(config: NormalConfig, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Experts' matrices [e, outputs, inputs] with the gates above the others: a checkpoint's are [e, inputs, outputs],
    or [e, outputs, blocks of inputs] in MXFP4, and gates take turns with the others."""
    waiting: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in tensors:
        stem, _, kind = name.rpartition("_")
        if ".mlp.experts." not in name or kind == "bias":
            yield name, _sorted(tensor) if name.endswith("gate_up_proj_bias") else tensor
        elif kind not in ("blocks", "scales"):
            matrix = tensor.transpose(1, 2)
            yield name, _sorted(matrix) if name.endswith("gate_up_proj") else matrix
        elif stem in waiting:
            _, other = waiting.pop(stem)
            matrix = dequantize(other, tensor) if kind == "scales" else dequantize(tensor, other)
            yield stem, _sorted(matrix) if stem.endswith("gate_up_proj") else matrix
        else:
            waiting[stem] = name, tensor
    yield from waiting.values()  # halves of pairs: nothing has their names


def _sorted(tensor: Tensor) -> Tensor:
    """Every other one of dim 1, then the others."""
    return torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1)


DEFAULTS = {
    "gpt_oss": {
        "dtype": "bfloat16",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "norm_eps": 1e-05,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "attention_bias": True,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
}
"""model_type -> what its config.json means where it is silent."""

EXPERTS = ExpertNames(router="mlp.router", merged_router="mlp.router")
FAMILY = Family(names=Names(experts=EXPERTS), block=_block, convert=_convert)
