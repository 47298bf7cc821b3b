"""OLMo 2: what attention and MLP give is normalized, not what they read; q and k are normalized over all heads."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Names, block_spec


def olmo_block(config: NormalConfig, layer: int) -> BlockSpec:
    """Of OLMo 2; OLMo 3 starts from it."""
    return replace(
        block_spec(config, layer),
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        qk_norm="all",
        norms_before=False,
        norms_after=True,
    )


DEFAULTS = {
    "olmo2": {
        "max_position_embeddings": 2048,
        "norm_eps": 1e-05,
    },
}
"""model_type -> what its config.json means where it is silent."""

NAMES = Names(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
FAMILY = Family(names=NAMES, block=olmo_block)
