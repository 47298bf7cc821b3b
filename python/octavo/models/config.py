"""One normal form of the many spellings of a model's config.json.

Models, the memory plan and the worker read `NormalConfig`. Not here: spellings and defaults of fields
(config_reader.py), finding the file (sources.py) and which class runs it (registry.py). Nothing of Transformers is
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ModelError
from octavo.layers.frequencies import Rope
from octavo.layers.quant.stored import Quantization
from octavo.models.config_reader import Reader
from octavo.models.experts_config import ExpertsConfig, read_experts
from octavo.models.layer_kinds import num_layers_of, read_layer_kinds
from octavo.models.native import DEFAULT_ARCHITECTURES
from octavo.models.quantization import read_quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig(Rope):
    """Rotary embedding of heads of any size."""

    partial_rotary_factor: float = 1.0
    """How much of a head is rotated."""


@dataclass(frozen=True, slots=True)
class NormalConfig:
    """A decoder's shape. `layer_windows[i]` is layer i's sliding window in tokens, 0 = full attention."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int, ...]
    dtype: str
    """Of the checkpoint: float32, bfloat16 or float16."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    raw: Mapping[str, Any] = field(repr=False, compare=False, hash=False)
    """The whole config.json, as read."""
    quantization: Quantization | None = None
    """How the checkpoint keeps linear layers; None: plainly."""
    experts: ExpertsConfig | None = None
    """Of families whose defaults name `num_experts`."""
    layer_chunks: tuple[int, ...] = ()
    """Of each layer, the length of the runs of positions that it attends within (Llama 4), 0 = they are not cut; empty:
    no layer's are."""
    layer_rotates: tuple[bool, ...] = ()
    """Whether a layer rotates queries and keys; empty: all do."""
    value_dim: int = 0
    """The cache holds no V: it is the first `value_dim` of a token's `head_dim` numbers (latent attention; there is one
    KV head); 0: it holds V."""
    state_sizes: tuple[int, ...] = ()
    """Of each layer with a cache, of how many numbers (fp32) the state is that it keeps instead of keys and values, 0 =
    it keeps those; empty: all do."""
    layer_kinds: tuple[str, ...] = ()
    """Of each layer of a hybrid, its `layer_types` name; empty: all attend."""
    wide_layers: tuple[tuple[bool, bool], ...] = ()
    """Whether a layer's attention, and its MLP, stay wide when others are rounded as they load; empty: none's do."""
    local_theta: float | None = None
    """Base of the rotations of layers with a window, where it is given apart; their frequencies are plain."""


RENAMED = frozenset({"exaone", "sarvam_mla", "sarvam_moe"})
"""Model types whose configs or checkpoints have names of their own, though they name a class that Octavo has."""

DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}


def normalize_config(raw: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> NormalConfig:
    """Read a config.json (old spellings, the Transformers 5 form, or one with a nested `text_config`).

    `generation_config` adds its EOS ids. ModelError names the field that is missing or senseless.
    """
    reader = Reader(raw)
    heads = reader.integer("num_attention_heads")
    hidden = reader.integer("hidden_size")
    layers = num_layers_of(reader)
    kv_heads, head_dim, value_dim = _heads(reader, hidden, heads)
    max_position = reader.integer("max_position_embeddings", 2048)
    attention_bias = bool(reader.get("attention_bias", False))
    rotates = _layer_rotates(reader, layers)
    family = reader.model_type
    return NormalConfig(
        architecture=architecture_of(raw),
        model_type=family,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size", 4 * hidden),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        layer_rotates=rotates,
        layer_chunks=_layer_chunks(reader, rotates),
        max_position_embeddings=max_position,
        norm_eps=reader.number("norm_eps"),
        hidden_act=str(reader.get("hidden_act")),
        rope=_rope(reader, max_position),
        local_theta=_local_theta(reader),
        tie_word_embeddings=_tied(raw, reader),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias and family != "qwen2",
        mlp_bias=bool(reader.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text", "olmo2"),
        layer_windows=_layer_windows(reader, layers),
        layer_kinds=read_layer_kinds(reader, layers),
        dtype=_dtype(reader),
        bos_token_id=next(iter(_token_ids(reader.get("bos_token_id"), "bos_token_id")), None),
        eos_token_ids=_eos_token_ids(reader, generation_config or {}),
        raw=raw,
        experts=read_experts(reader, layers),
        quantization=read_quantization(reader.raw),
    )


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The class that a config.json was saved from. ModelError when it does not tell."""
    names, model_type = raw.get("architectures"), str(raw.get("model_type", ""))
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    if model_type in DEFAULT_ARCHITECTURES:
        return DEFAULT_ARCHITECTURES[model_type]
    raise ModelError(f"config.json has no architectures, and model_type {model_type!r} does not tell it")


def _heads(reader: Reader, hidden: int, heads: int) -> tuple[int, int, int]:
    """(KV heads, head dim, `NormalConfig.value_dim`): what the cache holds of a token."""
    if "kv_lora_rank" in reader.defaults:  # a family with attention of latents
        rank = reader.integer("kv_lora_rank")
        return 1, rank + reader.integer("qk_rope_head_dim"), rank
    return _num_kv_heads(reader, heads), _head_dim(reader, hidden, heads), 0


def _num_kv_heads(reader: Reader, heads: int) -> int:
    if reader.model_type == "falcon" and reader.get("multi_query") and not reader.get("new_decoder_architecture"):
        return 1
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    return kv_heads


def _head_dim(reader: Reader, hidden: int, heads: int) -> int:
    if reader.get("head_dim") is None and hidden % heads:
        raise ModelError(f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    return reader.integer("head_dim", hidden // heads)


def _tied(raw: Mapping[str, Any], reader: Reader) -> bool:
    """The outer config decides for a model with `text_config` (the head belongs to the outer class)."""
    value = raw.get("tie_word_embeddings")
    return bool(reader.get("tie_word_embeddings", False) if value is None else value)


# Rope type -> what it can't be computed without.
_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope(reader: Reader, max_position: int) -> RopeConfig:
    """From `rope_parameters` (Transformers 5; nested by layer type or not) or `rope_scaling` + `rope_theta`."""
    given = reader.raw.get("rope_scaling") or reader.raw.get("rope_parameters")
    values = given or reader.defaults.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json: rope_parameters is {values!r}, not an object")
    if isinstance(values.get("full_attention"), Mapping):
        values = values["full_attention"]

    def number(name: str, default: float) -> float:
        value = values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"config.json: {name} of the rope parameters is {value!r}, not a number")
        return float(value)

    def optional(name: str) -> float | None:
        return number(name, 0.0) if values.get(name) is not None else None

    def numbers(name: str) -> tuple[float, ...]:
        found = values.get(name) or ()
        if not isinstance(found, list | tuple) or not all(isinstance(value, int | float) for value in found):
            raise ModelError(f"config.json: {name} of the rope parameters is {found!r}, not a list of numbers")
        return tuple(float(value) for value in found)

    kind = str(values.get("rope_type") or values.get("type") or "default")
    kind = "longrope" if kind == "su" else kind  # its first name
    name = "original_max_position_embeddings"
    original = reader.number(name) if reader.get(name) else number(name, max_position)
    if kind == "dynamic":  # its formula counts from the config's own length, whatever the rope parameters say
        original = max_position
    for name in _ROPE_NEEDS.get(kind, ()):
        if values.get(name) is None and reader.get(name) is None:
            raise ModelError(f"config.json: rope type {kind} has no {name}")
    factor = optional("factor")
    if factor is None:
        factor = max_position / original if kind in ("yarn", "longrope") else 1.0
    return RopeConfig(
        type=kind,
        theta=number("rope_theta", reader.number("rope_theta", 10000.0)),
        partial_rotary_factor=number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0)),
        factor=factor,
        original_max_position=int(original),
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),
        short_factor=numbers("short_factor"),
        long_factor=numbers("long_factor"),
    )


def _local_theta(reader: Reader) -> float | None:
    """In the Transformers 5 form, or in the older one (Gemma 3)."""
    parameters = reader.raw.get("rope_parameters")
    local = parameters.get("sliding_attention") if isinstance(parameters, Mapping) else None
    theta = local.get("rope_theta") if isinstance(local, Mapping) else reader.get("rope_local_base_freq")
    return None if theta is None else float(theta)


def _layer_windows(reader: Reader, layers: int) -> tuple[int, ...]:
    """Window of each layer: `layer_types` where given, else the family's rule."""
    window = reader.get("sliding_window") or 0
    if reader.get("use_sliding_window", True) is False:
        window = 0
    types = reader.raw.get("layer_types")
    if types is not None:
        return _windows_of_types(types, reader.integer("sliding_window", 1) if window else 0, layers)
    if not window:
        return (0,) * layers
    window = reader.integer("sliding_window")
    slides = _window_rule(reader)
    return tuple(window if slides(i) else 0 for i in range(layers))


def _layer_rotates(reader: Reader, layers: int) -> tuple[bool, ...]:
    """By `no_rope_layers` (whose name says the opposite of its numbers), or all but each so-manieth layer."""
    rotates = reader.get("no_rope_layers") or None
    if rotates is None:
        if reader.get("no_rope_layer_interval") is None:
            return ()
        step = reader.integer("no_rope_layer_interval")
        return tuple((layer + 1) % step != 0 for layer in range(layers))
    if not isinstance(rotates, list) or len(rotates) != layers:
        raise ModelError(f"config.json: no_rope_layers is {rotates!r}, not a list of {layers} numbers")
    return tuple(map(bool, rotates))


def _layer_chunks(reader: Reader, rotates: tuple[bool, ...]) -> tuple[int, ...]:
    """Of Llama 4: layers that rotate attend within chunks, unless `layer_types` says otherwise."""
    if not reader.get("attention_chunk_size"):
        return ()
    chunk, types = reader.integer("attention_chunk_size"), reader.raw.get("layer_types")
    if isinstance(types, list) and len(types) == len(rotates):
        return tuple(chunk if kind == "chunked_attention" else 0 for kind in types)
    return tuple(chunk if is_rotated else 0 for is_rotated in rotates)


def _window_rule(reader: Reader) -> Callable[[int], bool]:
    """Which layers slide, for a config.json without `layer_types`."""
    pattern = reader.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:  # a letter a layer, in turns: L for local
        return lambda i: pattern[i % len(pattern)] == "L"
    if pattern:
        every = reader.integer("sliding_window_pattern")
        return lambda i: bool((i + 1) % every)
    if reader.get("max_window_layers") is not None:
        first = reader.number("max_window_layers")
        return lambda i: i >= first
    return lambda i: True


def _windows_of_types(types: Any, window: int, layers: int) -> tuple[int, ...]:
    if not isinstance(types, list) or len(types) != layers:
        raise ModelError(f"config.json: layer_types is not a list of {layers} names")
    if "sliding_attention" in types and not window:
        raise ModelError("config.json: layer_types has sliding_attention but sliding_window is not set")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _dtype(reader: Reader) -> str:
    name = str(reader.get("dtype") or "float32").removeprefix("torch.")
    if name == "auto":
        return "float32"
    if name not in DTYPES:
        raise ModelError(f"config.json: dtype {name!r} is not one of {', '.join(sorted(set(DTYPES.values())))}")
    return DTYPES[name]


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    """An id or a list of ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelError(f"config.json: {name} is {value!r}, not a token id or a list of them")
    return tuple(ids)


def _eos_token_ids(reader: Reader, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Union of config.json's and generation_config.json's ids, without doubles and negatives."""
    ids = (
        *_token_ids(reader.get("eos_token_id"), "eos_token_id"),
        *_token_ids(generation.get("eos_token_id"), "eos_token_id"),
    )
    return tuple(dict.fromkeys(i for i in ids if i >= 0))
