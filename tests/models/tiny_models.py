"""Tiny random models of every family, as Transformers' config classes, saved the way checkpoints are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from random_weights import randomize
from safetensors import safe_open
from torch import Tensor

from octavo.models import registry
from octavo.models.base import CausalLM
from octavo.models.config import NormalConfig
from octavo.models.registry import build_model

SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SMALL = {
    "vocab_size": 101,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.01 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 128,
}
QWEN3_MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN2_MOE = {**QWEN3_MOE, "shared_expert_intermediate_size": 48}

QWEN3_NEXT = {
    **QWEN2_MOE,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}

MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 12, "mamba_n_groups": 2, "num_hidden_layers": 3}
NEMOTRON_H = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 12,
    "n_groups": 2,
    "head_dim": 16,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
}

MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
FALCON = {"num_kv_heads": 2, "ffn_hidden_size": 96}
DEEPSEEK_ROPE = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.8}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-head-dim-20": ("Llama", {"head_dim": 20}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": {**YARN_ROPE, "mscale": 1.3, "mscale_all_dim": 0.7}}),
    "llama-yarn-untruncated": (
        "Llama",
        {"rope_parameters": {**YARN_ROPE, "truncate": False, "attention_factor": 1.25}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 24}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3-biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", GPT2_SMALL),
    "gpt2-scaled": ("GPT2", {**GPT2_SMALL, "scale_attn_by_inverse_layer_idx": True, "n_inner": 80, "pad_token_id": 0}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": 4}),
    "gpt-neox-serial": ("GPTNeoX", {"num_key_value_heads": 4, "use_parallel_residual": False, "attention_bias": False}),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 11, "tie_word_embeddings": True}),
    "phi3-part-rotated": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 128}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 24, "sliding_window": 6, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    ),
    "gemma2-final-cap": ("Gemma2", {"head_dim": 16, "sliding_window": 64, "final_logit_softcapping": 0.1}),
    "gemma": ("Gemma", {"head_dim": 24}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 24,
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-biases": ("Olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        },
    ),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 24, "attention_bias": False}),
    "granite": ("Granite", {"logits_scaling": 3.0, "attention_multiplier": 0.3, "embedding_multiplier": 2.0}),
    "granite-residuals": ("Granite", {"residual_multiplier": 0.4, "attention_bias": True, "mlp_bias": True}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": (
        "Cohere2",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "cohere2-biases": ("Cohere2", {"sliding_window": 20, "attention_bias": True, "logit_scale": 0.5}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 9}),
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3-moe-renormalized": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True, "num_experts_per_tok": 3}),
    "qwen3-moe-some-layers": ("Qwen3Moe", {**QWEN3_MOE, "decoder_sparse_step": 2}),
    "qwen3-moe-dense-layer": ("Qwen3Moe", {**QWEN3_MOE, "mlp_only_layers": [1], "attention_bias": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 9}),
    "starcoder2-no-biases": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "qwen2-moe": ("Qwen2Moe", {**QWEN2_MOE, "mlp_only_layers": [1]}),
    "qwen2-moe-no-biases": ("Qwen2Moe", {**QWEN2_MOE, "qkv_bias": False, "norm_topk_prob": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-window": (
        "SmolLM3",
        {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 8, "attention_bias": True},
    ),
    "ministral": (
        "Ministral",
        {"head_dim": 16, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN_ROPE, "truncate": False},
        },
    ),
    "gpt-oss-no-biases": ("GptOss", {"head_dim": 24, "num_local_experts": 8, "attention_bias": False}),
    "deepseek-v2": (
        "DeepseekV2",
        {**MLA, "q_lora_rank": None, "rope_parameters": {**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {**MLA, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
    ),
    "deepseek-v3": ("DeepseekV3", {**MLA, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_ROPE}),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {**MLA, "n_group": 1, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False, "q_lora_rank": None},
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm4-moe-lite": ("Glm4MoeLite", {**MLA, "n_group": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "dots1": (
        "Dots1",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "sliding_window": 7,
            "max_window_layers": 2,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size_mlp": 80,
            "attention_chunk_size": 13,
            "no_rope_layer_interval": 3,
            "floor_scale": 10,
            "attn_scale": 0.5,
        },
    ),
    "llama4-some-experts": (
        "Llama4",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 80,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "no_rope_layers": [1, 0, 1],
            "attention_bias": True,
        },
    ),
    "granite-moe": (
        "GraniteMoe",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "residual_multiplier": 0.4, "attention_multiplier": 0.3},
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {"num_local_experts": 8, "shared_intermediate_size": 48, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    "olmo": ("Olmo", {}),
    "ernie": ("Ernie4_5", {"head_dim": 24}),
    "ernie-biases": ("Ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}),
    "ernie-moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 24,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0},
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {"head_dim": 16, "num_experts": 8, "moe_topk": [3, 3, 3], "attention_bias": True},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 24}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4-window": (
        "Exaone4",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "arcee": ("Arcee", {}),
    "nemotron": ("Nemotron", {"mlp_bias": True}),
    "phi": ("Phi", {}),
    "falcon": ("Falcon", {**FALCON, "bias": True}),
    "falcon-serial": (
        "Falcon",
        {**FALCON, "multi_query": False, "num_kv_heads": 4, "num_key_value_heads": 4, "parallel_attn": False},
    ),
    "falcon-new": ("Falcon", {**FALCON, "new_decoder_architecture": True, "tie_word_embeddings": False}),
    "falcon-one-norm": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    "jais2": ("Jais2", {}),
    "helium": ("Helium", {"head_dim": 16, "mlp_bias": True}),
    "apertus": ("Apertus", {}),
    "qwen3-next": ("Qwen3Next", QWEN3_NEXT),
    "qwen3-next-some-experts": (
        "Qwen3Next",
        {**QWEN3_NEXT, "linear_num_key_heads": 1, "mlp_only_layers": [1], "attention_bias": True, "head_dim": 24},
    ),
    "qwen3.5": ("Qwen3_5", {**QWEN3_NEXT, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**QWEN3_NEXT, "linear_num_key_heads": 4}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "bamba-biases": (
        "Bamba",
        {**MAMBA, "attn_layer_indices": [0, 2], "mamba_proj_bias": True, "mamba_conv_bias": False, "mlp_bias": True},
    ),
    "falcon-h1": (
        "FalconH1",
        {
            **MAMBA,
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.7],
            "mlp_multipliers": [1.3, 0.6],
            "key_multiplier": 1.7,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 1.2,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.7,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "falcon-h1-norm": ("FalconH1", {**MAMBA, "mamba_d_ssm": None, "mamba_rms_norm": True}),
    "falcon-h1-norm-last": (
        "FalconH1",
        {**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.3,
            "time_step_limit": (0.01, 2.0),
        },
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "layer_types": ["attention", "mamba", "mamba"],
            "shared_intermediate_size": 80,
            "num_local_experts": 0,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h": ("NemotronH", NEMOTRON_H),
    "nemotron-h-experts": (
        "NemotronH",
        {
            **NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.7,
            "n_group": 2,
            "topk_group": 1,
            "use_bias": True,
        },
    ),
    "phimoe": (
        "Phimoe",
        {"num_local_experts": 8, "router_jitter_noise": 0.4, "lm_head_bias": True, "attention_bias": True},
    ),
    "phimoe-window": ("Phimoe", {"num_local_experts": 4, "sliding_window": 9}),
    "opt": ("OPT", {"num_key_value_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64}),
}
"""Name -> (prefix of Transformers' config and model classes, what differs from SMALL)."""

MODEL_CLASSES = {"GPT2": "GPT2LMHeadModel"}

CONFIG_CLASSES = {
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
    "Gemma3": "Gemma3TextConfig",
    "Llama4": "Llama4TextConfig",
}

NATIVE_PREFIXES = (
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "Mixtral",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Phi3",
    "Granite",
    "Olmo2",
    "Olmo3",
    "Glm",
    "Glm4",
    "Cohere",
    "Cohere2",
    "StableLm",
    "Starcoder2",
    "SmolLM3",
    "Ministral",
    "Qwen2Moe",
    "GptOss",
    "DeepseekV2",
    "DeepseekV3",
    "Glm4Moe",
    "Glm4MoeLite",
    "Dots1",
    "Llama4",
    "GraniteMoe",
    "GraniteMoeShared",
    "Olmoe",
    "Olmo",
    "Ernie4_5",
    "Ernie4_5_Moe",
    "HunYuanDenseV1",
    "HunYuanMoEV1",
    "SeedOss",
    "Exaone4",
    "Arcee",
    "Nemotron",
    "Phi",
    "Falcon",
    "GPTNeoX",
    "Jais2",
    "Helium",
    "Apertus",
    "Phimoe",
    "Qwen3Next",
    "Qwen3_5",
    "Qwen3_5Moe",
    "Bamba",
    "FalconH1",
    "GraniteMoeHybrid",
    "NemotronH",
)


def make_reference(case: str, seed: int = 0) -> Any:
    """The Transformers model of a case: fp32, eager attention, every parameter random (norms and biases too)."""
    prefix, changes = CASES[case]
    base = {} if prefix == "GPT2" else SMALL
    config = getattr(transformers, CONFIG_CLASSES.get(prefix, f"{prefix}Config"))(**{**base, **changes})
    torch.manual_seed(seed)
    model_class = getattr(transformers, MODEL_CLASSES.get(prefix, f"{prefix}ForCausalLM"))
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize(model)
    return model


def save(model: Any, folder: Path) -> Path:
    """A checkpoint folder of a Transformers model."""
    model.save_pretrained(folder)
    return folder


def read_config(folder: Path, **changes: Any) -> NormalConfig:
    """The folder's config.json, with some fields changed."""
    return registry.read_config({**json.loads((folder / "config.json").read_text()), **changes})


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder's one safetensors file."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            yield name, file.get_tensor(name)


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> CausalLM:
    """Octavo's model of a checkpoint folder, on the CPU."""
    model = build_model(read_config(folder, **changes), dtype=dtype, device=torch.device("cpu"))
    model.load_weights(read_tensors(folder))
    return model
