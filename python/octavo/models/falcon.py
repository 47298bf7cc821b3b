"""Falcon (7B, 40B, 180B, 11B): attention and an MLP without a gate side by side, after one layer norm or one each;
heads that share keys and values are next to them in the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from octavo.layers.norm import NormSpec
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, Tensors, block_spec
from octavo.models.gpt_neox import by_part


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    reader = Reader(config.raw)
    has_biases, is_new = bool(reader.get("bias")), bool(reader.get("new_decoder_architecture"))
    return replace(
        block_spec(config, layer),
        norm=NormSpec(config.norm_eps, kind="layer", has_bias=True),
        is_parallel=is_new or bool(reader.get("parallel_attn")),
        has_own_norm=is_new and reader.get("num_ln_in_parallel_attn", 2) == 2,
        is_gated=False,
        qkv_bias=has_biases,
        o_bias=has_biases,
        mlp_bias=has_biases,
    )


def _convert(config: NormalConfig, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if ".query_key_value." in name:
            per_group = config.num_heads // config.num_kv_heads
            yield name, by_part(tensor, config.num_kv_heads, per_group, config.head_dim)
        else:
            yield (
                re.sub(r"\.ln_mlp\.", ".post_attention_layernorm.", name.replace(".ln_attn.", ".input_layernorm.")),
                tensor,
            )


DEFAULTS = {
    "falcon": {
        "eos_token_id": 11,
        "max_position_embeddings": 2048,
        "norm_eps": 1e-05,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "bias": False,
    },
}
"""model_type -> what its config.json means where it is silent."""

NAMES = Names(
    embed="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    layer="transformer.h.{i}",
    qkv="self_attention.query_key_value",
    o="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
FAMILY = Family(names=NAMES, block=_block, convert=_convert)
