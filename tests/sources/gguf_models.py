"""Tiny random models, written to .gguf as the converters write them: an independent second implementation.

It goes from Hugging Face names to GGUF names with the `gguf` package's own table, and applies the row order of Llama's
Q and K, the 1 of Gemma's norms and Llama 3's frequency table from their published definitions.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
WIDE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {}),
    "llama tied": ("llama", "Llama", {"tie_word_embeddings": True}),
    "llama biased": ("llama", "Llama", {"attention_bias": True}),
    "llama3 rope": ("llama", "Llama", {**WIDE, "rope_parameters": LLAMA3}),
    "llama linear rope": (
        "llama",
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": ("llama", "Mistral", {"sliding_window": 32}),
    "qwen2": ("qwen2", "Qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": ("qwen2", "Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 32}),
    "gemma": ("gemma", "Gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", "Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}),
    "gemma3": ("gemma3", "Gemma3", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}),
}
"""Name -> (GGUF architecture, prefix of the Transformers class, config fields)."""


def make_model(name: str) -> Any:
    """The Transformers model of a case, random weights (norms too, so that an off-by-one shows)."""
    _, prefix, fields = CASES[name]
    config_class = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config_class(**{**TINY, **fields})).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.normal_(mean=0.5, std=0.2)
    return model


def weights(model: Any) -> dict[str, Tensor]:
    """The checkpoint: without the head where it is the embedding."""
    state = {k: v for k, v in model.state_dict().items() if "rotary" not in k}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def write_model(path: Path, name: str, model: Any, *, kind: gguf.GGMLQuantizationType | None = None) -> Path:
    """Write a case's model to `path`; matrices in `kind` where given, everything else in float32."""
    architecture, _, _ = CASES[name]
    writer = gguf.GGUFWriter(path, architecture)
    add_shape(writer, model.config, architecture)
    names = gguf.get_tensor_name_map(
        next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture), model.config.num_hidden_layers
    )
    for hf_name, tensor in weights(model).items():
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        values = converted(hf_name, tensor, model.config, architecture).numpy()
        if kind is not None and values.ndim == 2:
            writer.add_tensor(gguf_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, values)
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, model.config.head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_shape(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def converted(name: str, tensor: Tensor, config: Any, architecture: str) -> Tensor:
    """A tensor's values as the file stores them."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, num in heads.items():
        if architecture == "llama" and part in name:
            rows = tensor.reshape(num, 2, tensor.shape[0] // num // 2, *tensor.shape[1:])
            return rows.swapaxes(1, 2).reshape(tensor.shape).contiguous()
    return tensor


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Llama 3's factor for each frequency, as published."""
    out = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wave
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(1.0, max(0.0, smooth))
        out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(out, dtype=np.float32)
