"""Phi 3, 3.5 and 4 (mini, small, 14B): Llama's block whose checkpoints keep q, k and v in one tensor, gate and up in
another; heads may be rotated in part."""

from __future__ import annotations

from octavo.models.family import Family, Names, block_spec

DEFAULTS = {
    "phi3": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "norm_eps": 1e-05,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"), block=block_spec)
