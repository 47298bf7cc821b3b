"""A tiny random model of any Transformers architecture: its config class with every size made small.

Sizes are found by the names that config classes use; what a name table can't tell is in `CHANGES`, by model type.
Lists that say something of each layer are cut so that every kind of layer stays. Not here: what is done with the model.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from random_weights import randomize
from transformers import PreTrainedConfig

VOCAB = 128
MAX_PARAMETERS = 60_000_000

SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?|vocabulary_size|n_vocab|padded_vocab_size", VOCAB),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|model_dim|n_embed|embedding_size|word_embed_proj_dim|emb_dim", 64),
    (r"out_hidden_size|text_hidden_size|projection_dim|output_hidden_size", 64),
    (r"(shared_expert_|moe_|dense_|block_|expert_|moe_shared_expert_)?intermediate_size(_mlp)?", 96),
    (r"ffn_dim|n_inner|ffn_hidden_size|intermediate_dim|d_ff|d_inner|(de|en)coder_ffn_dim|dim_ff|inner_size", 96),
    (r"shared_intermediate_size|attn_intermediate_size|feed_forward_size|moe_ffn_hidden_size", 96),
    (r"num_hidden_layers|n_layers?|num_layers|(de|en)coder_layers|num_(de|en)coder_layers|depth", 4),
    (r"num_attention_heads|n_heads?|num_heads|(de|en)coder_attention_heads|num_(de|en)coder_attention_heads", 4),
    (r"num_key_value_heads|num_kv_heads|n_head_kv|num_global_key_value_heads|num_query_groups", 2),
    (r"head_dim|attention_head_dim|d_kv|kv_channels|head_size|attention_head_size|global_head_dim", 16),
    (r"qk_nope_head_dim|v_head_dim", 24),
    (r"qk_rope_head_dim", 16),
    (r"(kv|q)_lora_rank", 24),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_local_experts", 8),
    (r"num_experts_per_(tok|token)|moe_topk|moe_k|moe_top_k|top_k_experts|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"max_position_embeddings|n_positions|max_sequence_length|max_seq_len|n_ctx|max_target_positions", 256),
    (r"sliding_window|window_size|local_attention|attention_window", 12),
    (r"attention_chunk_size", 16),
)
"""Full name of a config's field -> its size."""

MROPE_SECTION = [2, 3, 3]
"""Rotary frequencies of time, height, and width: half of the head's dimension."""

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": MROPE_SECTION}

MROPE_TYPES = (
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen2_5_omni_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "qwen3_omni_moe_text",
    "paddleocr_vl_text",
    "glm_ocr_text",
    "glm4v_text",
)

CHANGES: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_id": 4, "audio_token_id": 5, "image_token_offset": 10, "audio_token_offset": 26},
    "apertus1p5_vision_tokenizer": {"codebook_size": 16, "embed_dim": 16, "latent_channels": 32, "base_channels": 32},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 16, "mamba_n_groups": 1},
    "blt": {"max_position_embeddings": 256},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"per_layer_config": {}, "swa_head_dim": 40, "head_dim": 40},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {"per_layer_config": {}, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
    "gemma4_unified_text": {"per_layer_config": {}, "num_kv_shared_layers": 0},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_expand": 2,
        "mamba_d_state": 16,
    },
    "inkling2_loop_text": {"unpadded_vocab_size": 128},
    "inkling2_text": {"unpadded_vocab_size": 128},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {
        "num_layers": 2,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 96,
        "n_routed_experts": 8,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "qk_head_dim": 40,
        "head_dim": 16,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "emu3_vqgan": {"base_channels": 32, "codebook_size": 64},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [96, 64],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
    },
    "florence_vision": {"embed_dim": [16, 32, 32, 64], "num_heads": [2, 2, 4, 4], "num_groups": [2, 2, 4, 4]},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "spatial_target_layers": [1]},
    "hunyuan_vl_text": {"rope_parameters": MROPE | {"mrope_section": [2, 2, 2, 2]}},
    "janus_vqgan": {"base_channels": 32, "latent_channels": 32},
    "janus_vision_model": {"projection_dim": 64},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16], "attn_layers": ["local", "lsh"] * 2},
    "rwkv": {"attention_hidden_size": 64},
    "xlnet": {"d_head": 16},
    "xlstm": {"num_heads": 4, "embedding_dim": 64, "num_blocks": 2, "qk_dim_factor": 0.5, "v_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "mistral4": {"head_dim": 32, "qk_head_dim": 32, "qk_nope_head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [3, 2]},
    "muse_spark_audio": {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]},
    "muse_spark": {"projector_hidden_size": 64},
    "muse_spark_text": {"moe_hidden_size": 64},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "output_gate_type": "sigmoid",
    },
    "step3p5": {"sliding_window": 12},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "wavtokenizer_encoder": {"hidden_size": 64, "codebook_dim": 64, "codebook_size": 16},
    **{name: {"rope_parameters": MROPE} for name in MROPE_TYPES},
    "glm4v_moe_text": {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 4, "n_mamba_heads": 2},
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_d_state": 16,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
    },
}
"""model_type -> fields that the table does not get right."""


def tiny_config(config_class: type[PreTrainedConfig], model_class: Any) -> PreTrainedConfig:
    """The default config of a class, made small, its nested configs too; the part of it that `model_class` takes."""
    config = config_class.from_dict(shrink(config_class().to_dict()))
    text = config.get_text_config(decoder=True)
    is_text_model = isinstance(text, model_class.config_class) and not isinstance(config, model_class.config_class)
    return text if is_text_model else config


def shrink(raw: dict[str, Any]) -> dict[str, Any]:
    """A config as a dictionary with small sizes."""
    small: dict[str, Any] = {}
    for name, value in raw.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = shrink(value)
        elif name in TOKENS:
            small[name] = TOKENS[name]
        elif isinstance(value, dict) and "mrope_section" in value:
            small[name] = value | {"mrope_section": MROPE_SECTION}
        elif name == "mrope_section" and isinstance(value, list):
            small[name] = MROPE_SECTION
        else:
            small[name] = _small(name, value)
    depth = next((key for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if key in small), "")
    for name, value in raw.items():
        if depth and isinstance(value, list) and len(value) == raw[depth]:
            small[name] = one_of_each(value, small[depth])
    if isinstance(small.get("vision_config"), dict) and isinstance(small.get("text_config"), dict):
        depth = small["vision_config"].get("num_hidden_layers") or small["vision_config"].get("depth") or 1
        for name in ("vision_feature_layer", "deepstack_visual_indexes"):
            if isinstance(raw.get(name), list):
                small[name] = [min(abs(i), depth - 1) for i in raw[name]]
    if "per_layer_config" in raw:
        small["per_layer_config"] = {}
    if "head_dim" in raw and raw["head_dim"] is None:
        small["head_dim"] = 16
    if "kv_lora_rank" in raw and small.get("num_key_value_heads") is not None:
        small["num_key_value_heads"] = small.get("num_attention_heads")
    if raw.get("is_decoder") is False:
        small["is_decoder"] = True
    return small | CHANGES.get(str(raw.get("model_type")), {})


def _small(name: str, value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return min(size, value) if value > 0 else value
    return value


def one_of_each(kinds: list[Any], length: int) -> list[Any]:
    """`length` entries in which every kind of the list appears, in the order of their first appearance."""
    distinct = list(dict.fromkeys(kinds)) if all(isinstance(kind, str) for kind in kinds) else []
    if not distinct or len(distinct) > length:
        return kinds[:length]
    return sorted((distinct * length)[:length], key=distinct.index)


def make_model(model_class: Any, config: PreTrainedConfig, seed: int = 0) -> Any:
    """fp32, eager attention, every parameter random. ValueError when it is not tiny."""
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class._from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size} parameters are not tiny")
    torch.manual_seed(seed)
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize(model)
    return model
