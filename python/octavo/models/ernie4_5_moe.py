"""ERNIE 4.5 with mixtures of experts (21B-A3B, 300B-A47B): chosen by a softmax with a bias, an MLP beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from octavo.layers.moe import Routing
from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader
from octavo.models.deepseek_v3 import NAMES, shared_size
from octavo.models.ernie4_5 import ernie_block
from octavo.models.family import BlockSpec, Family, Tensors

CHOICE_BIAS = "moe_statics.e_score_correction_bias"


def _block(config: NormalConfig, layer: int) -> BlockSpec:
    spec = ernie_block(config, layer)
    if spec.experts is None:
        return spec
    routing = Routing(renormalize=True, has_choice_bias=True, is_exact=True)
    size = shared_size(Reader(config.raw), spec.experts)
    return replace(spec, experts=replace(spec.experts, routing=routing), shared_size=size)


def _convert(config: NormalConfig, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """The bias goes by two names, and has a dim more. Predictors of further tokens are not run."""
    for name, tensor in tensors:
        if name.endswith(CHOICE_BIAS):
            yield f"{name.split('.mlp.')[0]}.mlp.gate.e_score_correction_bias", tensor.flatten()
        elif not name.startswith("model.mtp_"):
            yield name, tensor


DEFAULTS = {
    "ernie4_5_moe": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "norm_eps": 1e-05,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
}
"""model_type -> what its config.json means where it is silent."""

FAMILY = Family(names=NAMES, block=_block, convert=_convert)
