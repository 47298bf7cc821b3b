"""Steps of native families as a card would run them, over tensors without memory: the fused kernels take what they can,
and refuse what they can't."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from octavo.config import make_engine_config
from octavo.worker.device import DeviceFacts

CARD = DeviceFacts("cuda", "", 140 << 30, 140 << 30, 2, has_bfloat16=True, has_fp8=True)
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
SQUARES = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
FUSED: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-squares": LLAMA | SQUARES,
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 8},
}
PLAIN: dict[str, dict[str, Any]] = {
    "gemma": {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
    "phi3-part-rotated": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75},
    "granite": {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "logits_scaling": 8.0},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"},
    "cohere2": {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2"},
    "stablelm": {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"},
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"},
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"},
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 256,
    },
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "deepseek_v3-squares": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **SQUARES},
    "glm4_moe": {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"},
    "llama4": {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "attention_chunk_size": 512},
    "ernie_moe": {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe"},
    "hunyuan": {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense"},
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 16},
    "bamba": {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "attn_layer_indices": [1]},
    "falcon_h1": {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "mamba_n_heads": 16},
    "granite_hybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*-M-",
        "mamba_num_heads": 8,
    },
    "nemotron_h-experts": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "MEM*",
        "mamba_num_heads": 8,
        "moe_intermediate_size": 256,
    },
    "falcon": {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "head_dim": None,
    },
}
"""Families -> their config.json; of FUSED, whole decode steps run in fused kernels."""

PROGRAM = """
import json, sys
import torch
import octavo.worker.kernel_jobs as b

orders = json.load(sys.stdin)
found = {}
for name, order in orders.items():
    read = b.Order.read(json.dumps(order))
    assert read is not None, name
    b.compile_for(read.capability)
    with torch.inference_mode():
        steps = b.MetaSteps.make(read.config, read.normal, read.quantization, is_asked=False)
    needed, rest = b.rounds_of_jobs(read)
    found[name] = [steps.model.decode_kernels is not None, len(needed) + len(rest)]
print(json.dumps(found))
"""


def test_steps_of_every_family() -> None:
    """In a process of its own: it makes Triton believe in a device."""
    options = asdict(make_engine_config({"model": "", "max_num_seqs": 8, "max_num_batched_tokens": 256}))
    orders = {
        name: {"config": options, "raw_config": SIZES | raw, "device": asdict(CARD), "capability": [9, 0]}
        for name, raw in (FUSED | PLAIN).items()
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(orders), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name for name, (is_fused, _) in found.items() if is_fused} == set(FUSED)
    assert all(num_kernels > 10 for _, num_kernels in found.values())
