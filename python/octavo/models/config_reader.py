"""Fields of a config.json under one name each: other spellings, and what a family means where the file is silent.

Defaults are those of the Transformers class of the same `model_type` (facts of configuration_<model_type>.py). Not
here: what fields mean together (config.py; what only one family has, the family's file).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from octavo.errors import ModelError
from octavo.models.native import DEFAULT_ARCHITECTURES, NATIVE

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "max_position_embeddings": ("n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "hidden_act": ("hidden_activation", "activation_function", "activation", "mlp_hidden_act"),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct",),
    "dtype": ("torch_dtype",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_k", "moe_topk"),
    "decoder_sparse_step": ("interleave_moe_layer_step", "moe_layer_interval"),
    "first_k_dense_replace": ("moe_layer_start_index",),
    "n_shared_experts": ("moe_num_shared_experts",),
}
"""Our name of a field -> other spellings, tried in order."""

FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "head_dim": 128,
    },
    "gemma": {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
    },
    "gpt2": {
        "max_position_embeddings": 1024,
        "norm_eps": 1e-05,
        "tie_word_embeddings": True,
    },
    "ministral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
}
"""What a config.json of this `model_type` means where it is silent (Transformers writes only what differs), of families
that the embedded decoder runs too; others' are in their own files (`DEFAULTS`, found by models/native.py)."""

GLOBAL_DEFAULTS: dict[str, Any] = {"norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}


def _family_defaults(model_type: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of this module's table, or the native family's that runs the architecture."""
    if model_type in FAMILY_DEFAULTS:
        return FAMILY_DEFAULTS[model_type]
    names = raw.get("architectures") or [DEFAULT_ARCHITECTURES.get(model_type)]
    family = NATIVE.get(str(names[0]), "") if isinstance(names, list) else ""
    if not family:
        return {}
    defaults = getattr(import_module(family.split(":")[0]), "DEFAULTS", {})  # imports torch
    found: Mapping[str, Any] = defaults.get(model_type, {})
    return found


class Reader:
    """Looks fields up: config.json under any spelling, then the family's default."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        text = raw.get("text_config")
        self.raw: dict[str, Any] = {**raw, **text} if isinstance(text, dict) else dict(raw)
        self.model_type = str(self.raw.get("model_type", ""))
        self.defaults = {**GLOBAL_DEFAULTS, **_family_defaults(self.model_type, raw)}

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value as it stands."""
        spellings = (name, *ALIASES.get(name, ()))
        for key in spellings:
            if self.raw.get(key) is not None:
                return self.raw[key]
        if any(key in self.raw for key in spellings):  # an explicit null is an answer: it beats the family's default
            return default
        return self.defaults.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer below 2^31. ModelError when it is absent without a default, or not one."""
        value = self.get(name, default)
        if value is None:
            spellings = ", ".join((name, *ALIASES.get(name, ())))
            raise ModelError(f"config.json has no {name} (looked for: {spellings})")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (1 <= value < 2**31 and value == int(value))
        ):
            raise ModelError(f"config.json: {name} is {value!r}, not a positive integer below 2^31")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """ModelError when it is none."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"config.json: {name} is {value!r}, not a number")
        return float(value)
