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


DEFAULTS = {
    "starcoder2": {
        "max_position_embeddings": 4096,
        "norm_eps": 1e-05,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "tie_word_embeddings": True,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(up="mlp.c_fc", down="mlp.c_proj"), block=_block)
