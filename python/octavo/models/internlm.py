"""InternLM 2 and 2.5 (one tensor of q, k and v, by groups of heads that share them) and InternLM 3: Llama's block.

Transformers has no class for either; checkpoints bring their own code, which is not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.family import BlockSpec, Family, Names, Tensors, block_spec
from octavo.models.gpt_neox import by_part


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    """InternLM 2: its MLP never has biases."""
    has_biases = bool(Reader(config.raw).get("bias"))
    return replace(block_spec(config, layer), qkv_bias=has_biases, o_bias=has_biases)


def _block3(config: NormalConfig, layer: int) -> BlockSpec:
    reader = Reader(config.raw)
    qkv, others = bool(reader.get("qkv_bias")), bool(reader.get("bias"))
    return replace(block_spec(config, layer), qkv_bias=qkv, o_bias=others, mlp_bias=others)


def _convert(config: NormalConfig, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    per_group = config.num_heads // config.num_kv_heads
    for name, tensor in tensors:
        is_joined = ".wqkv." in name
        yield name, by_part(tensor, config.num_kv_heads, per_group, config.head_dim) if is_joined else tensor


DEFAULTS = {
    "internlm2": {
        "eos_token_id": 2,
        "max_position_embeddings": 2048,
        "norm_eps": 1e-06,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bias": True,
    },
    "internlm3": {
        "eos_token_id": 2,
        "max_position_embeddings": 32768,
        "norm_eps": 1e-06,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bias": False,
        "qkv_bias": False,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(
    names=Names(
        embed="model.tok_embeddings",
        head="output",
        input_norm="attention_norm",
        qkv="attention.wqkv",
        o="attention.wo",
        mlp_norm="ffn_norm",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
    ),
    block=_block,
    convert=_convert,
)
FAMILY_3 = Family(names=Names(), block=_block3)
