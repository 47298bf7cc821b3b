"""The normal form of a config.json that only Transformers understands: what its config class fills in, under the common
names (it maps old spellings to them). Not here: the normal form itself and the families that Octavo has (config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import transformers

from octavo.errors import ModelError
from octavo.models.config import NormalConfig, normalize_config

COMMON = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "head_dim",
)
"""Fields that config classes map to their own spelling."""

ABSENT = {"num_attention_heads": 1, "max_position_embeddings": 2048}
"""For models without attention, and without a bound on positions."""


def foreign_config(raw: Mapping[str, Any]) -> Any:
    """Transformers' config of a config.json. ModelError: it does not know the model type, or rejects the values."""
    plain = deepcopy(dict(raw))
    plain.pop("quantization_config", None)  # weights come dequantized
    model_type = str(raw.get("model_type", ""))
    if model_type not in transformers.CONFIG_MAPPING:
        raise unknown(raw)
    try:
        return with_own_kernels(transformers.CONFIG_MAPPING[model_type].from_dict(_with_floats(plain)))
    except Exception as error:  # foreign code with error classes of its own
        raise ModelError(f"Transformers rejects config.json: {error}") from error


def with_own_kernels(config: Any) -> Any:
    """A config without the functions that config.json may name: Transformers fetches "owner/name" from the hub."""
    config._attn_implementation = None
    config._experts_implementation = None
    return config


def _common(text: Any, name: str) -> int | None:
    """A size under its common name; the largest where layers differ, `ABSENT` where there is none."""
    try:
        value = getattr(text, name, None)
    except RuntimeError:  # layers differ
        value = [getattr(layer, name, None) for layer in text.per_layer_config]
    if isinstance(value, list | tuple):
        value = max((item for item in value if isinstance(item, int)), default=None)
    return ABSENT.get(name) if not isinstance(value, int) or value < 1 else value


def _with_floats(value: Any) -> Any:
    """Transformers writes infinities, which JSON has not, as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if isinstance(value, dict):
        return float(value["__float__"]) if "__float__" in value else {k: _with_floats(v) for k, v in value.items()}
    return value


def unknown(raw: Mapping[str, Any]) -> ModelError:
    """The error for a model that nobody here has code for."""
    architecture = (raw.get("architectures") or ["?"])[0]
    if "auto_map" in raw:
        return ModelError(
            f"{architecture} comes with its own code (auto_map in config.json), which Octavo does not run without "
            "--trust-remote-code"
        )
    return ModelError(
        f"architecture {architecture} (model_type {raw.get('model_type')!r}) is not a decoder that Octavo or the "
        f"installed Transformers {transformers.__version__} knows; a newer Transformers may know it"
    )


def normalize_foreign(raw: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> NormalConfig:
    """`normalize_config` of a model that Octavo has no layers for. ModelError as `foreign_config`."""
    text = foreign_config(raw).get_text_config(decoder=True)
    filled = {key: value for key, value in text.to_dict().items() if key != "layer_types"}
    for name in COMMON:
        filled[name] = _common(text, name)
    filled["vocab_size"] = _common(text, "decoder_vocab_size") or filled["vocab_size"]  # of Marian's decoder alone
    heads, kv_heads = filled["num_attention_heads"], filled["num_key_value_heads"]
    if isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
        filled["num_key_value_heads"] = heads  # the field means something else there; the attention's own calls count
    for name in ("model_type", "architectures", "tie_word_embeddings", "quantization_config"):
        if raw.get(name) is not None:
            filled[name] = raw[name]
    return replace(normalize_config(filled, generation_config), raw=raw)
