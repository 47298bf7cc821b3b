"""Fields of a config.json under one name each: other spellings, and what a family means where the file is silent.

Defaults are those of the Transformers class of the same `model_type` (facts of configuration_<model_type>.py). Not
here: what fields mean together (config.py; what only one family has, the family's file).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "max_position_embeddings": ("n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "hidden_act": ("hidden_activation", "activation_function", "activation"),
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

GLM = {
    "max_position_embeddings": 131072,
    "norm_eps": 1.5625e-7,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}
COHERE = {
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
}

DEEPSEEK_V3 = {
    "max_position_embeddings": 4096,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
}

ERNIE = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}

FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
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
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "mixtral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
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
    "gpt2": {"max_position_embeddings": 1024, "norm_eps": 1e-5, "tie_word_embeddings": True},
    "gpt_neox": {
        "use_parallel_residual": True,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "attention_bias": True,
    },
    "phi3": {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "norm_eps": 1e-5},
    "granite": {"max_position_embeddings": 2048, "norm_eps": 1e-6},
    "olmo2": {"max_position_embeddings": 2048, "norm_eps": 1e-5},
    "olmo3": {
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "glm": GLM,
    "glm4": GLM,
    "cohere": COHERE | {"rope_theta": 500_000.0},
    "cohere2": COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
    "starcoder2": {
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen2_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "deepseek_v2": DEEPSEEK_V3
    | {
        "max_position_embeddings": 2048,
        "num_experts": 64,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
    },
    "glm4_moe": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    "dots1": {
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    "llama4_text": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    "granitemoe": {"max_position_embeddings": 2048, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "granitemoeshared": {
        "max_position_embeddings": 2048,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "olmoe": {
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "intermediate_size": 2048,
        "eos_token_id": 50279,
    },
    "olmo": {"max_position_embeddings": 2048, "norm_eps": 1e-5, "eos_token_id": 50279},
    "ernie4_5": ERNIE | {"head_dim": 128},
    "ernie4_5_moe": ERNIE
    | {
        "num_key_value_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "hunyuan_v1_dense": {"max_position_embeddings": 2048, "norm_eps": 1e-5},
    "hunyuan_v1_moe": {
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
    },
    "seed_oss": {
        "max_position_embeddings": 524288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
    },
    "exaone4": {
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "arcee": {"max_position_embeddings": 4096, "norm_eps": 1e-5, "hidden_act": "relu2"},
    "nemotron": {
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "hidden_act": "relu2",
        "partial_rotary_factor": 0.5,
    },
    "falcon": {
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "bias": False,
    },
    "phi": {
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
    },
    "gpt_oss": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "attention_bias": True,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
    "smollm3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "ministral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "stablelm": {"max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.25},
}
"""What a config.json of this `model_type` means where it is silent (Transformers writes only what differs)."""

GLOBAL_DEFAULTS: dict[str, Any] = {"norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}


class Reader:
    """Looks fields up: config.json under any spelling, then the family's default."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        text = raw.get("text_config")
        self.raw: dict[str, Any] = {**raw, **text} if isinstance(text, dict) else dict(raw)
        self.model_type = str(self.raw.get("model_type", ""))
        self.defaults = {**GLOBAL_DEFAULTS, **FAMILY_DEFAULTS.get(self.model_type, {})}

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
