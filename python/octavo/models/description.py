"""What the embedded decoder (rust/cpu) is told of a model, once: sizes, norms, rotations, scales. Pure: no torch.

A model that the description can't express is named by `obstacle`, and runs with PyTorch. Not here: weights
(stored_weights.py).

Shape suffixes: f rotary_dim / 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.layers.activation_names import KINDS
from octavo.layers.frequencies import FREQUENCIES, Rope, RotarySpec, frequencies
from octavo.models.config import RENAMED, NormalConfig, RopeConfig
from octavo.models.gemma_config import NORM_SHIFT, gemma_config

ACTIVATIONS = {name: kind for name, kind in KINDS.items() if kind != "relu2"}
"""Those that the decoder has: their names in config.json -> in the decoder."""


@dataclass(frozen=True, slots=True)
class Description:
    """A decoder. Norms are RMS norms; layers are pre-norm blocks with rotary attention and a gated MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    """A value of `ACTIVATIONS`."""
    layer_windows: tuple[int, ...]
    """Of each layer; 0 = full attention."""
    layer_ropes: tuple[int, ...]
    """Which of `ropes` each layer has."""
    ropes: tuple[tuple[list[float], float], ...]
    """(angle per position [f], factor of cosines and sines)."""
    is_tied: bool
    """The head is the embedding matrix."""
    has_qk_norm: bool
    has_output_norms: bool
    """Norms after attention and after the MLP too, before each is added to the residual (Gemma 2 and 3)."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    attention_scale: float
    embedding_scale: float = 1.0
    attention_cap: float = 0.0
    """Scores become cap * tanh(score / cap); 0: they don't."""
    logit_cap: float = 0.0
    norm_shift: float = 0.0
    """Added to the norms' weights of a Hugging Face checkpoint."""


@dataclass(frozen=True, slots=True)
class Departure:
    """How a family departs from Llama."""

    qkv_bias: bool | None = None
    """None: as the config says."""
    has_biases: bool = True
    """The config may ask for biases of other products."""
    has_qk_norm: bool = False
    has_local_rope: bool = False
    """Layers with a window rotate by plain frequencies of a base of their own."""
    extra: Callable[[NormalConfig], dict[str, Any]] = field(default=lambda config: {})
    """More fields of `Description`."""


def _gemma(config: NormalConfig) -> dict[str, Any]:
    """Norms by 1 + weight, scaled embeddings; capped scores and logits where there are caps."""
    gemma = gemma_config(config)
    return {
        "norm_shift": NORM_SHIFT,
        "embedding_scale": gemma.embedding_scale,
        "activation": ACTIVATIONS.get(gemma.activation, "gelu_tanh"),
        "attention_scale": gemma.attention_scale,
        "attention_cap": gemma.attention_cap,
        "logit_cap": gemma.logit_cap,
    }


def _gemma2(config: NormalConfig) -> dict[str, Any]:
    """Norms on both sides."""
    return {**_gemma(config), "has_output_norms": True}


FAMILIES = {
    "LlamaForCausalLM": Departure(),
    "MistralForCausalLM": Departure(qkv_bias=False, has_biases=False),
    "Qwen2ForCausalLM": Departure(qkv_bias=True, has_biases=False),
    "Qwen3ForCausalLM": Departure(has_qk_norm=True),
    "GemmaForCausalLM": Departure(extra=_gemma),
    "Gemma2ForCausalLM": Departure(extra=_gemma2),
    "Gemma3ForCausalLM": Departure(has_qk_norm=True, has_local_rope=True, extra=_gemma2),
}
"""By architecture."""


def obstacle(config: NormalConfig) -> str | None:
    """Why the embedded decoder can't run a model; None when it can."""
    if config.architecture not in FAMILIES or config.model_type in RENAMED:
        return f"it has no {config.architecture} of type {config.model_type}"
    if config.quantization is not None:
        return f"it reads no {config.quantization.method} checkpoints"
    if config.hidden_act not in ACTIVATIONS:
        return f"it has no activation {config.hidden_act!r}"
    if config.rope.type not in FREQUENCIES:
        return f"it has no rope type {config.rope.type!r}"
    return None


def describe(config: NormalConfig, max_length: int) -> Description:
    """Of a model without an `obstacle`, for sequences up to `max_length`. ModelError as `frequencies`."""
    family = FAMILIES[config.architecture]
    ropes = [config.rope]
    if family.has_local_rope:
        ropes.append(RopeConfig(theta=gemma_config(config).local_theta))
    own = {
        "activation": ACTIVATIONS[config.hidden_act],
        "layer_ropes": tuple(int(family.has_local_rope and window > 0) for window in config.layer_windows),
        "attention_scale": config.head_dim**-0.5,
        "has_output_norms": False,
        **family.extra(config),
    }
    return Description(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        layer_windows=config.layer_windows,
        ropes=tuple(_angles(rope, config.head_dim, max_length) for rope in ropes),
        is_tied=config.tie_word_embeddings,
        has_qk_norm=family.has_qk_norm,
        qkv_bias=config.qkv_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=config.o_bias and family.has_biases,
        mlp_bias=config.mlp_bias and family.has_biases,
        **own,
    )


def _angles(rope: RopeConfig, head_dim: int, max_length: int) -> tuple[list[float], float]:
    values_f, factor = frequencies(rotary_spec(rope, head_dim), max_length)
    return values_f.tolist(), factor


def rotary_spec(rope: RopeConfig, head_dim: int) -> RotarySpec:
    """A rotary embedding of heads of `head_dim`."""
    is_whole = rope.type == "proportional"  # all dims are rotated, the last ones by nothing
    return RotarySpec(
        **{shared.name: getattr(rope, shared.name) for shared in fields(Rope)},
        rotary_dim=head_dim if is_whole else int(head_dim * rope.partial_rotary_factor),
        proportion=rope.partial_rotary_factor if is_whole else 1.0,
    )
