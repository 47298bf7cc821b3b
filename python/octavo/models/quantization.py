"""What a config.json says of quantized weights (`quantization_config`), in one normal form. Pure: no torch.

Formats: Hugging Face `fp8` (scales a tensor, or of blocks: `weight_scale_inv`), `compressed-tensors` with 8-bit
floats (scales a tensor, a channel or a block), and those of NVIDIA's Model Optimizer that are fp8 with scales of a
tensor or a channel (`modelopt`; its older checkpoints say so in a file of their own). Scales of activations
(`input_scale`) are not used: activations are quantized row by row, which is never coarser. Not here: the tensors
(layers/quant/fp8_tensors.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import ModelError
from octavo.layers.quant.stored import Quantization

QUANT_FILE = "hf_quant_config.json"
"""Where Model Optimizer says what it did, if not in config.json."""
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
"""Its `quant_algo` of fp8 with scales of a tensor or of channels."""
STRATEGIES = ("tensor", "channel", "block")
"""How compressed-tensors may share scales among weights."""


def read_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """Of a config.json (or its `text_config`); None: weights are plain. ModelError names what can't be read."""
    found = raw.get("quantization_config") or raw.get("compression_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise ModelError(f"config.json: quantization_config is {found!r}, not an object")
    method = str(found.get("quant_method", "unknown"))
    if method == "mxfp4" and raw.get("model_type") == "gpt_oss":
        return None  # the family makes plain numbers of them
    reader = {"fp8": _hugging_face, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt}.get(method)
    if reader is None:
        raise _unreadable(method)
    return reader(found)


def _unreadable(what: str) -> ModelError:
    return ModelError(
        f"config.json: weights are quantized ({what}), which this version does not read; it reads fp8 "
        "(quant_method fp8, compressed-tensors with 8-bit floats, and modelopt's FP8) and gpt-oss's mxfp4. Use one of "
        "those, the unquantized one (--quantization fp8 converts it) or a .gguf of it"
    )


def with_quant_file(raw: Mapping[str, Any], content: Mapping[str, Any] | None) -> dict[str, Any]:
    """A config.json with what QUANT_FILE (None: there is none) says, unless it says something itself."""
    found = (content or {}).get("quantization")
    if not isinstance(found, Mapping) or raw.get("quantization_config") or not found.get("quant_algo"):
        return dict(raw)
    return {**raw, "quantization_config": {"quant_method": "modelopt", **found}}


def _modelopt(config: Mapping[str, Any]) -> Quantization:
    algorithm = str(config.get("quant_algo")).upper()
    if algorithm not in MODELOPT:
        raise _unreadable(f"modelopt, {algorithm}")
    ignored = config.get("ignore") or config.get("exclude_modules") or ()
    return Quantization(
        method="fp8", block=None, targets=("",), ignored=tuple(_glob_pattern(str(name)) for name in ignored)
    )


def _glob_pattern(name: str) -> str:
    """Of a module and all in it; * stands for anything."""
    return ".*".join(map(re.escape, name.split("*"))) + r"(?:\.|$)"


def _hugging_face(config: Mapping[str, Any]) -> Quantization:
    if str(config.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unreadable(f"fp8 with fmt {config['fmt']}")
    skipped = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    return Quantization(
        method="fp8",
        block=_block(config.get("weight_block_size"), "weight_block_size"),
        targets=("",),
        ignored=tuple(_module_pattern(str(name)) for name in skipped),
    )


def _module_pattern(name: str) -> str:
    """As Transformers reads an entry of `modules_to_not_convert`: a regular expression up to a module's border, or the
    end of a name."""
    try:
        re.compile(name)
    except re.error:
        return f".*{re.escape(name)}$"
    return rf"(?:{name})(?:(?<=\.)|(?=\.|$))|.*{re.escape(name)}$"


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError("config.json: quantization_config of compressed-tensors has no config_groups")
    targets: list[str] = []
    blocks: set[tuple[int, int] | None] = set()
    for group in groups.values():
        weights = group.get("weights") or {}
        kind, strategy = f"{weights.get('num_bits')}-bit {weights.get('type')}", weights.get("strategy")
        if kind != "8-bit float" or strategy not in STRATEGIES or not weights.get("symmetric", True):
            raise _unreadable(f"compressed-tensors, {config.get('format')}, {kind} with strategy {strategy}")
        blocks.add(_block(weights.get("block_structure"), "block_structure") if strategy == "block" else None)
        targets += [_target_pattern(str(name)) for name in group.get("targets") or ("Linear",)]
    if len(blocks) > 1:
        raise _unreadable("compressed-tensors, groups with different blocks")
    ignored = tuple(_target_pattern(str(name)) for name in config.get("ignore") or ())
    return Quantization(method="fp8", block=blocks.pop(), targets=tuple(targets), ignored=ignored)


def _target_pattern(name: str) -> str:
    """As compressed-tensors reads a name: "re:" and a regular expression, the class of all linear layers, or a whole
    name."""
    if name.startswith("re:"):
        return name.removeprefix("re:")
    return "" if name == "Linear" else f"{re.escape(name)}$"


def _block(value: Any, field: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(f"config.json: {field} is {value!r}, not two positive integers")
    return sizes[0], sizes[1]
