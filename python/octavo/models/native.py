"""The architectures that Octavo has layers for. Pure: no torch. Which class runs a config: registry.py."""

from __future__ import annotations

STATE_SPACE = {"Mamba2ForCausalLM": "octavo.models.mamba2:Mamba2"}
"""Classes of models without attention; their configs are Transformers'."""

NATIVE = {
    "LlamaForCausalLM": "octavo.models.llama:FAMILY",
    "MistralForCausalLM": "octavo.models.mistral:FAMILY",
    "MinistralForCausalLM": "octavo.models.mistral:FAMILY",
    "Qwen2ForCausalLM": "octavo.models.qwen2:FAMILY",
    "Qwen3ForCausalLM": "octavo.models.qwen3:FAMILY",
    "Qwen3MoeForCausalLM": "octavo.models.qwen3_moe:FAMILY",
    "MixtralForCausalLM": "octavo.models.mixtral:FAMILY",
    "GemmaForCausalLM": "octavo.models.gemma:FAMILY",
    "Gemma2ForCausalLM": "octavo.models.gemma2:FAMILY",
    "Gemma3ForCausalLM": "octavo.models.gemma3:FAMILY",
    "Phi3ForCausalLM": "octavo.models.phi3:FAMILY",
    "GraniteForCausalLM": "octavo.models.granite:FAMILY",
    "Olmo2ForCausalLM": "octavo.models.olmo2:FAMILY",
    "Olmo3ForCausalLM": "octavo.models.olmo3:FAMILY",
    "GlmForCausalLM": "octavo.models.glm:FAMILY",
    "Glm4ForCausalLM": "octavo.models.glm4:FAMILY",
    "CohereForCausalLM": "octavo.models.cohere:FAMILY",
    "Cohere2ForCausalLM": "octavo.models.cohere2:FAMILY",
    "SmolLM3ForCausalLM": "octavo.models.smollm3:FAMILY",
    "StableLmForCausalLM": "octavo.models.stablelm:FAMILY",
    "Starcoder2ForCausalLM": "octavo.models.starcoder2:FAMILY",
    "Qwen2MoeForCausalLM": "octavo.models.qwen2_moe:FAMILY",
    "GptOssForCausalLM": "octavo.models.gpt_oss:FAMILY",
    "DeepseekV2ForCausalLM": "octavo.models.deepseek_v2:FAMILY",
    "DeepseekV3ForCausalLM": "octavo.models.deepseek_v3:FAMILY",
    "Glm4MoeForCausalLM": "octavo.models.glm4_moe:FAMILY",
    "Glm4MoeLiteForCausalLM": "octavo.models.glm4_moe_lite:FAMILY",
    "Dots1ForCausalLM": "octavo.models.dots1:FAMILY",
    "Llama4ForCausalLM": "octavo.models.llama4:FAMILY",
    "GraniteMoeForCausalLM": "octavo.models.granite_moe:FAMILY",
    "GraniteMoeSharedForCausalLM": "octavo.models.granite_moe:FAMILY",
    "OlmoeForCausalLM": "octavo.models.olmoe:FAMILY",
    "OlmoForCausalLM": "octavo.models.olmo:FAMILY",
    "Ernie4_5ForCausalLM": "octavo.models.ernie4_5:FAMILY",
    "Ernie4_5_MoeForCausalLM": "octavo.models.ernie4_5_moe:FAMILY",
    "HunYuanDenseV1ForCausalLM": "octavo.models.hunyuan:FAMILY",
    "HunYuanMoEV1ForCausalLM": "octavo.models.hunyuan:FAMILY",
    "SeedOssForCausalLM": "octavo.models.seed_oss:FAMILY",
    "Exaone4ForCausalLM": "octavo.models.exaone4:FAMILY",
    "ArceeForCausalLM": "octavo.models.arcee:FAMILY",
    "NemotronForCausalLM": "octavo.models.nemotron:FAMILY",
    "PhiForCausalLM": "octavo.models.phi:FAMILY",
    "GPTNeoXForCausalLM": "octavo.models.gpt_neox:FAMILY",
    "FalconForCausalLM": "octavo.models.falcon:FAMILY",
    "InternLM2ForCausalLM": "octavo.models.internlm:FAMILY",
    "InternLM3ForCausalLM": "octavo.models.internlm:FAMILY_3",
    "Jais2ForCausalLM": "octavo.models.jais2:FAMILY",
    "HeliumForCausalLM": "octavo.models.helium:FAMILY",
    "ApertusForCausalLM": "octavo.models.apertus:FAMILY",
    "Qwen3NextForCausalLM": "octavo.models.qwen3_next:FAMILY",
    "Qwen3_5ForCausalLM": "octavo.models.qwen3_next:FAMILY",
    "Qwen3_5MoeForCausalLM": "octavo.models.qwen3_next:FAMILY",
    "PhimoeForCausalLM": "octavo.models.phimoe:FAMILY",
    "FalconH1ForCausalLM": "octavo.models.falcon_h1:FAMILY",
    "BambaForCausalLM": "octavo.models.bamba:FAMILY",
    "GraniteMoeHybridForCausalLM": "octavo.models.granite_hybrid:FAMILY",
    "NemotronHForCausalLM": "octavo.models.nemotron_h:FAMILY",
}
"""Architecture (config.json `architectures[0]`) -> its `Family`."""

FOREIGN_OPTIONS = {
    "GemmaForCausalLM": ("use_bidirectional_attention",),
    "Gemma2ForCausalLM": ("use_bidirectional_attention",),
    "Gemma3ForCausalLM": ("use_bidirectional_attention",),
    "CohereForCausalLM": ("use_qk_norm",),
    "StableLmForCausalLM": ("qk_layernorm",),
    "DeepseekV2ForCausalLM": ("attention_bias",),
    "DeepseekV3ForCausalLM": ("attention_bias",),
    "Glm4MoeLiteForCausalLM": ("attention_bias",),
    "OlmoForCausalLM": ("clip_qkv",),
    "OlmoeForCausalLM": ("clip_qkv",),
    "FalconForCausalLM": ("alibi",),
    "PhiForCausalLM": ("qk_layernorm",),
    "NemotronHForCausalLM": ("moe_latent_size",),
}
"""Options of an architecture that its `Family` does not have."""

DEFAULT_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
"""For a config.json without `architectures`."""
