"""The normal form of config.json: every family against Transformers' config classes, old spellings, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from octavo.errors import ModelError
from octavo.models.config import ExpertsConfig, NormalConfig, normalize_config

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3Text", "GPT2", "GPTNeoX", "Phi3", "Olmo2"]
FAMILIES += ["Mixtral", "Qwen3Moe", "Qwen2Moe", "Granite", "Olmo3", "Glm", "Glm4", "Cohere", "Cohere2"]
FAMILIES += ["StableLm", "Starcoder2", "SmolLM3", "Ministral"]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}

OTHERS = (
    "GptOss",
    "DeepseekV3",
    "Glm4Moe",
    "Glm4MoeLite",
    "Llama4Text",
    "GraniteMoe",
    "GraniteMoeShared",
    "Olmo",
    "Olmoe",
    "Ernie4_5",
    "Ernie4_5_Moe",
    "HunYuanDenseV1",
    "SeedOss",
    "Exaone4",
    "Arcee",
    "Nemotron",
    "Phi",
    "Falcon",
    "Jais2",
    "Apertus",
    "SmolLM3",
)
"""Whose defaults are in their own files."""


def llama(**fields: Any) -> NormalConfig:
    return normalize_config({**LLAMA, **fields})


def architecture(family: str) -> str:
    return f"{family.removesuffix('Text')}ForCausalLM"


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_defaults_are_those_of_transformers(family: str) -> None:
    """A config.json that says only the sizes means what the Transformers class makes of it."""
    config_class = getattr(transformers, f"{family}Config")
    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "intermediate_size": 128,
    }
    if family in ("Phi3", "Glm", "Glm4"):
        sizes["pad_token_id"] = 0
    full = config_class(**sizes)
    named = {"architectures": [architecture(family)], "model_type": full.model_type}
    short, long = normalize_config({**sizes, **named}), normalize_config({**full.to_dict(), **named})
    for field in ("max_position_embeddings", "num_kv_heads", "head_dim", "norm_eps", "tie_word_embeddings"):
        assert getattr(short, field) == getattr(long, field), field
    assert short.rope == long.rope
    assert short.layer_windows == long.layer_windows
    assert short.experts == long.experts
    assert (short.qkv_bias, short.o_bias) == (long.qkv_bias, long.o_bias)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_against_transformers(family: str) -> None:
    full = getattr(transformers, f"{family}Config")()
    normal = normalize_config(
        json.loads(full.to_json_string(use_diff=False)) | {"architectures": [architecture(family)]}
    )
    assert normal.vocab_size == full.vocab_size
    assert normal.hidden_size == full.hidden_size
    assert normal.num_layers == full.num_hidden_layers
    assert normal.num_heads == full.num_attention_heads
    assert normal.num_kv_heads == (getattr(full, "num_key_value_heads", None) or full.num_attention_heads)
    assert normal.head_dim == getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads
    assert normal.max_position_embeddings == full.max_position_embeddings
    assert normal.tie_word_embeddings == full.tie_word_embeddings
    types = getattr(full, "layer_types", None)
    if types:
        assert [w > 0 for w in normal.layer_windows] == [t == "sliding_attention" for t in types]


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 2.0},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16,
        "attention_factor": 1.5,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_old_and_new_rope_spellings_mean_the_same(kind: str) -> None:
    old = llama(rope_theta=5e5, rope_scaling=ROPES[kind], max_position_embeddings=2048)
    new = llama(rope_parameters={"rope_theta": 5e5, **ROPES[kind], "rope_type": kind}, max_position_embeddings=2048)
    assert old.rope == new.rope
    assert old.rope.type == kind
    assert old.rope.theta == 5e5
    assert old.rope.factor == ROPES[kind]["factor"]
    assert old.rope.original_max_position == ROPES[kind].get("original_max_position_embeddings", 2048)


def test_rope_details() -> None:
    yarn = llama(rope_scaling=ROPES["yarn"]).rope
    assert (yarn.beta_fast, yarn.beta_slow, yarn.attention_factor) == (16.0, 1.0, 1.5)
    assert llama(rope_scaling={**ROPES["yarn"], "factor": None}, max_position_embeddings=4096).rope.factor == 8.0
    assert llama(rope_theta=None).rope.theta == 10000.0
    nested = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}}
    assert llama(rope_parameters=nested).rope.theta == 1e6
    assert llama(partial_rotary_factor=0.5).rope.partial_rotary_factor == 0.5


def test_windows() -> None:
    assert llama().layer_windows == (0, 0, 0, 0)
    assert llama(model_type="mistral").layer_windows == (4096,) * 4
    assert llama(model_type="mistral", sliding_window=None).layer_windows == (0, 0, 0, 0)
    qwen = {"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 3}
    assert llama(**qwen, use_sliding_window=True).layer_windows == (0, 0, 0, 16)
    assert llama(**qwen, use_sliding_window=False).layer_windows == (0, 0, 0, 0)
    assert llama(model_type="gemma2", sliding_window=8).layer_windows == (8, 0, 8, 0)
    types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert llama(layer_types=types, sliding_window=5).layer_windows == (0, 5, 0, 5)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("bfloat16", "bfloat16"),
        ("torch.float16", "float16"),
        ("auto", "float32"),
        (None, "float32"),
        ("half", "float16"),
    ],
)
def test_dtype_under_both_names(written: str | None, expected: str) -> None:
    assert llama(torch_dtype=written).dtype == expected
    assert llama(dtype=written).dtype == expected


def test_eos_ids_are_united() -> None:
    assert llama(eos_token_id=2).eos_token_ids == (2,)
    assert llama(eos_token_id=None).eos_token_ids == ()
    both = normalize_config({**LLAMA, "eos_token_id": [7, 2]}, {"eos_token_id": [2, 9]})
    assert both.eos_token_ids == (7, 2, 9)
    assert llama(bos_token_id=1).bos_token_id == 1


def test_biases_and_norms() -> None:
    assert (llama().qkv_bias, llama().o_bias) == (False, False)
    assert (llama(attention_bias=True).qkv_bias, llama(attention_bias=True).o_bias) == (True, True)
    qwen2 = llama(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert llama(model_type="qwen3").qk_norm
    assert llama(mlp_bias=True).mlp_bias


def test_experts() -> None:
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 6,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    }
    config = llama(model_type="qwen3_moe", moe_intermediate_size=32, norm_topk_prob=True, **raw)
    assert config.experts == ExpertsConfig(16, 4, 32, True, (True,) * 6)
    some = llama(model_type="qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3], **raw).experts
    assert some is not None
    assert some.is_sparse == (False, True, False, False, False, True)
    assert not some.renormalize
    named = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    mixtral = llama(num_local_experts=8, **named).experts
    assert mixtral is not None
    assert (mixtral.num_experts, mixtral.top_k, mixtral.renormalize) == (8, 2, True)
    assert llama().experts is None
    with pytest.raises(ModelError, match="num_experts_per_tok 20 is more than"):
        llama(num_experts_per_tok=20, **named)
    with pytest.raises(ModelError, match="mlp_only_layers"):
        llama(model_type="qwen3_moe", mlp_only_layers="1", architectures=["Qwen3MoeForCausalLM"])


def test_nested_text_config() -> None:
    inner = {k: v for k, v in LLAMA.items() if k != "architectures"} | {"tie_word_embeddings": True}
    raw = {"architectures": ["OuterForConditionalGeneration"], "model_type": "outer", "text_config": inner}
    normal = normalize_config(raw)
    assert normal.architecture == "OuterForConditionalGeneration"
    assert (normal.model_type, normal.hidden_size, normal.tie_word_embeddings) == ("llama", 64, True)
    assert not normalize_config({**raw, "tie_word_embeddings": False}).tie_word_embeddings
    assert normal.raw is raw


def test_spellings_of_gpt2() -> None:
    raw = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 9, "n_embd": 12, "n_head": 3}
    normal = normalize_config({**raw, "n_layer": 2, "n_positions": 77, "n_inner": None, "layer_norm_epsilon": 1e-4})
    assert (normal.hidden_size, normal.num_heads, normal.num_layers) == (12, 3, 2)
    assert (normal.max_position_embeddings, normal.intermediate_size, normal.norm_eps) == (77, 48, 1e-4)
    assert normal.tie_word_embeddings


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"hidden_size": None}, r"no hidden_size \(looked for: hidden_size, n_embd, d_model\)"),
    "overflow": ({"hidden_size": 10**12}, "hidden_size is 1000000000000, not a positive integer below"),
    "infinite": ({"vocab_size": float("inf")}, "vocab_size is inf, not a positive integer"),
    "text": ({"num_hidden_layers": "four"}, "num_hidden_layers is 'four', not a positive integer"),
    "zero": ({"vocab_size": 0}, "vocab_size is 0"),
    "bool": ({"num_attention_heads": True}, "num_attention_heads is True"),
    "heads do not divide": (
        {"num_attention_heads": 7, "num_key_value_heads": 7},
        "hidden_size 64 is no multiple of num_attention_heads 7",
    ),
    "kv heads do not divide": ({"num_key_value_heads": 3}, "8 is no multiple of num_key_value_heads 3"),
    "no architecture": ({"architectures": None, "model_type": "new"}, "has no architectures, and model_type 'new'"),
    "dtype": ({"torch_dtype": "int3"}, "dtype 'int3' is not one of"),
    "layer types": ({"layer_types": ["full_attention"]}, "layer_types is not a list of 4 names"),
    "layer kind": ({"layer_types": ["linear_attention"] * 4}, "layers of type linear_attention"),
    "window without size": ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is not set"),
    "rope": ({"rope_scaling": {"type": "linear"}}, "rope type linear has no factor"),
    "rope text": ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor of the rope parameters is 'x'"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    "eps": ({"rms_norm_eps": "tiny"}, "norm_eps is 'tiny', not a number"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, r"weights are quantized \(gptq\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_senseless_configs_name_the_field(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        llama(**fields)
