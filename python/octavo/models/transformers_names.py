"""Checkpoint tensors in the form that a Transformers class of today has them: old names, missing prefixes, and tensors
that it keeps fused or split. The rules are Transformers' own (its conversion mapping).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.pytorch_utils import Conv1D

from octavo.layers.quant.fp8_experts import SCALE
from octavo.layers.quant.fp8_tensors import FLOAT8, SCALES


class CheckpointNames:
    """The naming rules of one model. Made while the model is whole; `causal` may be on the meta device."""

    def __init__(self, causal: Any) -> None:
        rules = get_model_conversion_mapping(causal)
        self.renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self.converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self.by_pattern = {pattern: rule for rule in self.converters for pattern in rule.source_patterns}
        self.prefix = causal.base_model_prefix
        self.known: dict[str, Tensor] = causal.state_dict()
        self.hf_config = causal.config
        left = sorted(getattr(causal, "_keys_to_ignore_on_load_unexpected", None) or ())
        self.left = re.compile("|".join(f"(?:{pattern})" for pattern in left) or "$^")
        """Tensors of checkpoints that the class leaves out, unless it has them: drafters, tokenizers of pictures."""
        self.turned = {f"{name}.weight" for name, module in causal.named_modules() if isinstance(module, Conv1D)}
        """Weights that the class has [i, o]."""

    def wanted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Without those that the class leaves out."""
        for name, tensor in tensors:
            if not self.left.search(name) or self._has(name):
                yield name, tensor

    def _has(self, name: str) -> bool:
        """The model has the tensor, or that which it is the scale or a part of."""
        layer, _, kind = name.rpartition(".")
        return self._rename(f"{layer}.weight" if kind in SCALES else name.removesuffix(SCALE))[0] in self.known

    def convert(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights under the model's names. Fused tensors come last, when all their parts are there. What is
        in fp8 is for layers that take it as it is, and never fused."""
        parts: dict[str, list[tuple[str, str, Tensor]]] = {}
        for name, tensor in tensors:
            layer, _, kind = name.rpartition(".")
            is_scale = (kind in SCALES or kind.endswith(SCALE)) and name not in self.known
            if tensor.dtype in FLOAT8 or is_scale:
                yield f"{self.layer_name(layer)}.{kind}", tensor
                continue
            renamed, pattern = self._rename(name)
            if pattern is None:
                yield renamed, tensor
            else:
                parts.setdefault(renamed, []).append((name, pattern, tensor))
        for renamed, found in parts.items():
            yield from self._fuse(renamed, found)

    def get_parameter(self, name: str) -> Tensor:
        """What converters ask of a model: the shape of a tensor."""
        return self.known[name]

    def plain_name(self, name: str) -> str:
        """The model's name of a tensor that it takes as it is; "" of others. Scales are named as their weights."""
        layer, _, kind = name.rpartition(".")
        renamed, pattern = self._rename(f"{layer}.weight" if kind in SCALES else name)
        if pattern is not None or renamed in self.turned:
            return ""
        return f"{renamed.removesuffix('.weight')}.{kind}" if kind in SCALES else renamed

    def layer_name(self, layer: str) -> str:
        """The model's name of a layer, or what it would be of one that the model has fused."""
        return self._rename(f"{layer}.weight", is_fused=False)[0].removesuffix(".weight")

    def _rename(self, name: str, *, is_fused: bool = True) -> tuple[str, str | None]:
        """(model's name, pattern of the converter that wants the tensor); without converters if not `is_fused`."""
        converters = self.converters if is_fused else []
        renamed, pattern = rename_source_key(name, self.renamings, converters, self.prefix, self.known)
        if renamed in self.known or name not in self.known:
            return renamed, pattern
        return name, None

    def _fuse(self, renamed: str, found: list[tuple[str, str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What a converter makes of its parts, in the natural order of their names."""
        converter = deepcopy(self.by_pattern[found[0][1]])
        for name, pattern, tensor in sorted(found, key=lambda part: dot_natural_key(part[0])):
            converter.add_tensor(renamed, name, pattern, _given(tensor))
        for target, made in converter.convert(renamed, model=self, config=self.hf_config).items():
            yield target, made[0] if isinstance(made, list) else made


def _given(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor
