"""What a Gemma's config.json says beyond the common fields. Pure: no torch. Read by the families (gemma.py, gemma2.py,
gemma3.py) and by the embedded decoder's description (description.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.config import NormalConfig
from octavo.models.config_reader import Reader

NORM_SHIFT = 1.0
"""Norms multiply by 1 + weight."""
GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """Gemma 1 has no caps, and the usual scale of scores."""

    activation: str
    embedding_scale: float
    attention_scale: float
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    local_theta: float = 10000.0
    """The rotations' base in layers with a window (Gemma 3), whose frequencies are plain."""


def gemma_config(config: NormalConfig) -> GemmaConfig:
    """Of any Gemma. ModelError: a field is senseless."""
    reader = Reader(config.raw)
    is_first = config.model_type == "gemma"
    activation = str(reader.raw.get("hidden_activation") or reader.get("hidden_act"))
    scale = config.head_dim if is_first else reader.number("query_pre_attn_scalar", 256.0)
    return GemmaConfig(
        activation=GELU if is_first and activation == "gelu" else activation,  # it said gelu and meant this one
        embedding_scale=config.hidden_size**0.5,
        attention_scale=scale**-0.5,
        attention_cap=reader.number("attn_logit_softcapping", 0.0),
        logit_cap=reader.number("final_logit_softcapping", 0.0),
        local_theta=config.local_theta or 10000.0,
    )
