"""Llama 4, text (Scout, Maverick): layers that rotate attend within chunks and norm their queries and keys; those that
do not see everything, with queries that grow. Experts' inputs are weighed; one MLP beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from octavo.layers.moe import ExpertNames, Routing
from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, SharedNames, Temperature, Tensors, block_spec


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec, reader = block_spec(config, layer), Reader(config.raw)
    spec = replace(
        spec, intermediate_size=reader.integer("intermediate_size_mlp"), qkv_bias=config.qkv_bias, o_bias=config.o_bias
    )
    if spec.experts is not None:
        routing = Routing(score="sigmoid", weighs_input=True)
        spec = replace(spec, experts=replace(spec.experts, routing=routing), shared_size=spec.experts.intermediate_size)
    if spec.rope is None:
        tuned = Temperature(reader.number("floor_scale"), reader.number("attn_scale"))
        return replace(spec, temperature=tuned if reader.get("attn_temperature_tuning") else None)
    return replace(
        spec,
        rope=replace(spec.rope, is_interleaved=True),
        qk_norm="head" if reader.get("use_qk_norm") else "none",
        qk_norm_spec=NormSpec(config.norm_eps, has_weight=False),
        norms_rotated=True,
    )


def _convert(config: NormalConfig, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Experts' matrices are kept [e, inputs, outputs]."""
    for name, tensor in tensors:
        yield name, tensor.transpose(1, 2) if ".feed_forward.experts." in name else tensor


DEFAULTS = {
    "llama4_text": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "norm_eps": 1e-05,
        "rope_theta": 500_000.0,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
}
"""model_type -> what its config.json means where it is silent."""

EXPERTS = ExpertNames(
    router="feed_forward.router",
    experts="feed_forward.experts",
    merged_router="feed_forward.router",
    merged_gate_up="feed_forward.experts.gate_up_proj",
    merged_down="feed_forward.experts.down_proj",
)
NAMES = Names(
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    experts=EXPERTS,
    shared=SharedNames(mlp="feed_forward.shared_expert", gate=""),
)
FAMILY = Family(names=NAMES, block=_block, convert=_convert)
