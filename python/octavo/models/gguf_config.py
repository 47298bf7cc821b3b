"""The config.json that a .gguf file's metadata stands for.

Only what the file says: heads are tied when it has no output matrix, biases and QK norms exist when their tensors do,
RoPE scaling is read from its keys or recovered from the frequency table. Not here: the tensors (gguf_tensors.py).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from octavo.errors import ModelError
from octavo.models.gguf_file import GGUFFile

SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Recommended sampling in the metadata -> its name in generation_config.json."""

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>")
"""Control tokens that end an answer where the file's chat template uses them."""

CONTROL = 3
"""Token type of the format."""


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """What a GGUF architecture is called in Transformers, and the config fields that its metadata does not carry."""

    model_type: str
    architecture: str
    fixed: dict[str, Any]
    sandwich: bool = False


GEMMA_ACTIVATION = "gelu_pytorch_tanh"

FAMILIES = {
    "llama": GGUFFamily("llama", "LlamaForCausalLM", {"hidden_act": "silu"}),
    "mistral": GGUFFamily("mistral", "MistralForCausalLM", {"hidden_act": "silu"}),
    "qwen2": GGUFFamily("qwen2", "Qwen2ForCausalLM", {"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": GGUFFamily("qwen3", "Qwen3ForCausalLM", {"hidden_act": "silu", "use_sliding_window": False}),
    "gemma": GGUFFamily("gemma", "GemmaForCausalLM", {"hidden_act": GEMMA_ACTIVATION}),
    "gemma2": GGUFFamily("gemma2", "Gemma2ForCausalLM", {"hidden_activation": GEMMA_ACTIVATION}, sandwich=True),
    "gemma3": GGUFFamily("gemma3_text", "Gemma3ForCausalLM", {"hidden_activation": GEMMA_ACTIVATION}, sandwich=True),
}

LARGE_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The 27B sizes scale queries by hidden_size / num_heads instead of head_dim; the file tells them by their depth."""


class _Keys:
    """The `<architecture>.*` values of a file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """One integer; a per-layer list must hold the same one everywhere."""
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int):
            what = "is missing" if value is None else "differs between layers" if isinstance(value, list) else "is odd"
            raise ModelError(f"{self.file.path}: {self.architecture}.{key} {what}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float):
            raise ModelError(f"{self.file.path}: {self.architecture}.{key} is {value!r}, not a number")
        return _shortest(value)


def _shortest(value: float) -> float:
    """The shortest decimal with this float32 value: 1e-05 is stored as 9.999999747378752e-06."""
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return float(value)


def read_config(file: GGUFFile) -> dict[str, Any]:
    """A config.json. ModelError: an architecture that is not mapped, or metadata that is missing or contradictory."""
    keys = _Keys(file)
    if "general.architecture" not in file.metadata:
        raise ModelError(f"{file.path}: general.architecture is missing")
    family = FAMILIES.get(keys.architecture)
    if family is None:
        raise ModelError(
            f"{file.path}: GGUF architecture {keys.architecture!r} is not one of {', '.join(FAMILIES)}; "
            "use the model's safetensors folder instead"
        )
    if keys.get("expert_count"):
        raise ModelError(f"{file.path}: GGUF files of mixture-of-experts models are not supported by this version")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.fixed,
        **_shape(keys),
        **_rope(keys),
        **_windows(keys),
        **_token_ids(file),
        "attention_bias": keys.architecture != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }
    if family.sandwich:
        config |= _gemma_scales(keys, config)
    if keys.architecture == "llama" and config.get("sliding_window"):
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return config


def _shape(keys: _Keys) -> dict[str, Any]:
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{keys.file.path}: tensor token_embd.weight is missing")
    if heads < 1 or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise ModelError(f"{keys.file.path}: attention.head_count, embedding_length and token_embd.weight do not fit")
    rotated = keys.integer("rope.dimension_count", hidden // heads)
    head_dim = keys.integer("attention.key_length", rotated)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{keys.file.path}: keys and values of different lengths are not supported")
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{keys.file.path}: heads that are rotated in part (rope.dimension_count) are not supported")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-6),
    }


def _dtype(file: GGUFFile) -> str:
    """bfloat16 or float16 where the file stores matrices so, else float32 (quantized ones come back as that)."""
    from gguf.constants import GGMLQuantizationType as Kind

    kinds = {t.type for t in file.tensors.values()}
    return "bfloat16" if Kind.BF16 in kinds else "float16" if Kind.F16 in kinds else "float32"


def _windows(keys: _Keys) -> dict[str, Any]:
    """Sliding window; which layers slide is the family's rule, as in Transformers."""
    window = keys.get("attention.sliding_window")
    if keys.architecture == "mistral" and not window:
        return {"sliding_window": None}
    return {"sliding_window": int(window)} if window else {}


def _gemma_scales(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    large = config["num_hidden_layers"] == LARGE_GEMMA_LAYERS[keys.architecture]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    out: dict[str, Any] = {"query_pre_attn_scalar": per_head if large else config["head_dim"]}
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} if keys.architecture == "gemma2" else {}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = keys.get(name, caps.get(name))
        out[name] = None if value is None else _shortest(value)
    return out


def _rope(keys: _Keys) -> dict[str, Any]:
    """`rope_parameters` in the Transformers 5 form."""
    theta = keys.number("rope.freq_base", 10000.0)
    scaling = _scaling(keys, theta)
    if keys.architecture == "gemma3":
        local = keys.number("rope.freq_base_swa", 10000.0)
        return {
            "rope_parameters": {
                "full_attention": {"rope_theta": theta, **scaling},
                "sliding_attention": {"rope_theta": local, "rope_type": "default"},
            }
        }
    return {"rope_parameters": {"rope_theta": theta, **scaling}}


def _scaling(keys: _Keys, theta: float) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in keys.file.tensors:
        return _llama3_scaling(keys, theta)
    if kind == "none":
        return {"rope_type": "default"}
    factor = keys.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
        strength = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
            **({} if strength == 1.0 else {"attention_factor": strength * (1.0 + 0.1 * math.log(factor))}),
        }
    raise ModelError(f"{keys.file.path}: rope.scaling.type {kind!r} is not supported")


def _llama3_scaling(keys: _Keys, theta: float) -> dict[str, Any]:
    """Recover Llama 3's scaling from `rope_freqs.weight`, the factor by which each frequency is divided.

    The factors are 1 for short waves, F for long ones, and 1 / ((1 - s) / F + s) between, with s linear in
    original / wavelength; two factors between give the line, and with the published (1, 4) the original length.
    """
    tensor = keys.file.tensors["rope_freqs.weight"]
    if tensor.num_bytes != 4 * math.prod(tensor.shape):
        raise ModelError(f"{keys.file.path}: tensor rope_freqs.weight is not of type F32")
    factors = list(struct.unpack(f"<{tensor.num_bytes // 4}f", keys.file.data(tensor)))
    dim = 2 * len(factors)
    waves = [2 * math.pi * theta ** (2 * i / dim) for i in range(len(factors))]
    top = max(factors)
    if top == 1.0:
        return {"rope_type": "default"}
    between = [(w, (1 / f - 1 / top) / (1 - 1 / top)) for w, f in zip(waves, factors, strict=True) if 1 < f < top]
    low, high, original = 1.0, 4.0, 8192.0
    if len(between) >= 2:
        (w0, s0), (w1, s1) = between[0], between[-1]
        slope = (s0 - s1) / (1 / w0 - 1 / w1)
        low, original = -3.0 * (s0 - slope / w0), 3.0 * slope
        high = low + 3.0
    low, high, original = round(low, 3), round(high, 3), round(original)
    for wave, stored in zip(waves, factors, strict=True):
        smooth = min(1.0, max(0.0, (original / wave - low) / (high - low)))
        if abs(1 / ((1 - smooth) / top + smooth) / stored - 1) > 1e-2:
            raise ModelError(f"{keys.file.path}: tensor rope_freqs.weight is not a scaling that this version knows")
    return {
        "rope_type": "llama3",
        "factor": _shortest(top),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    """bos_token_id and eos_token_id (a list: EOS, end of turn, end of message)."""
    meta = file.metadata
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    template = meta.get("tokenizer.chat_template", "")
    tokens, types = meta.get("tokenizer.ggml.tokens", []), meta.get("tokenizer.ggml.token_type", [])
    named = [i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL]
    ends += [i for i in named if tokens[i] in END_OF_TURN and tokens[i] in template]
    eos = list(dict.fromkeys(i for i in ends if i is not None and i < len(tokens)))
    return {"bos_token_id": meta.get("tokenizer.ggml.bos_token_id"), "eos_token_id": eos or None}


def read_generation_config(file: GGUFFile) -> dict[str, Any]:
    """The sampling that the file recommends, as a generation_config.json would."""
    values = {name: file.metadata[key] for key, name in SAMPLING_KEYS.items() if key in file.metadata}
    return {name: _shortest(value) if isinstance(value, float) else value for name, value in values.items()}
