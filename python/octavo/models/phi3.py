"""Phi 3, 3.5 and 4 (mini, small, 14B): Llama's block whose checkpoints keep q, k and v in one tensor, gate and up in
another; heads may be rotated in part."""

from __future__ import annotations

from octavo.models.family import Family, Names, block_spec

FAMILY = Family(names=Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"), block=block_spec)
