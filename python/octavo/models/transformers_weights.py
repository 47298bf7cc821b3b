"""Checkpoint tensors into a Transformers model: its state by name, ours among it, tied names, and the
renaming rules of its class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from octavo.layers.chosen_experts import ChosenExperts
from octavo.layers.linear import Linear
from octavo.layers.moe import Merged
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.quant.fp8_experts import experts_apart
from octavo.layers.quant.fp8_tensors import as_kept
from octavo.layers.quant.stored import Quantization
from octavo.models.transformers_layers import finish_norms
from octavo.models.transformers_names import CheckpointNames
from octavo.models.weights import finish_products, load_strict


class Checkpoint:
    """Where each tensor goes. Made when the model has its memory, with names that the class had."""

    def __init__(self, causal: Any, names: CheckpointNames, quantization: Quantization | None) -> None:
        self._names = names
        self._quantization = quantization
        self._slots: dict[str, Tensor] = {}
        self._tied: dict[str, str] = {}
        owners: dict[int, str] = {}
        state, followers = causal.state_dict(keep_vars=True), causal.all_tied_weights_keys
        self._merged: dict[str, Merged] = {}
        for path, module in causal.named_modules():
            if isinstance(module, ChosenExperts):
                self._merged |= module.merged_slots()
            if isinstance(module, Linear | ChosenExperts):
                for own in module.state_dict():
                    del state[f"{path}.{own}"]
                self._slots |= module.slots()
            elif isinstance(module, RMSNorm | LayerNorm) and not module.has_weight:
                del state[f"{path}.weight"]
        for name in sorted(state, key=lambda name: name in followers):  # checkpoints have the names that lead
            tensor = state[name]
            owner = owners.setdefault(id(tensor), name)
            if owner == name:
                self._slots[name] = tensor
            else:
                self._tied[name] = owner

    def load(self, causal: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every tensor of the model; ModelError as `load_strict`."""
        tensors = self._names.wanted(tensors)
        if self._quantization is not None:
            tensors = as_kept(tensors, _OldNames(self._names, self._slots), self._quantization)
        named = self._turned(self._names.convert(tensors))
        apart = experts_apart(named, self._merged, self._quantization)
        kept = as_kept(apart, self._slots, self._quantization, self._merged, rounds_squares=True)
        load_strict(self._slots, self._tied, kept)
        finish_products(causal)
        finish_norms(causal)

    def _turned(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Weights of GPT-2's linear layers [i, o] as ours have them."""
        for name, tensor in tensors:
            yield name, tensor.t() if name in self._names.turned else tensor


class _OldNames(Mapping[str, Tensor]):
    """The slots by a checkpoint's names, of tensors that the model takes as they are: fp8 layers keep their numbers."""

    def __init__(self, names: CheckpointNames, slots: Mapping[str, Tensor]) -> None:
        self._names, self._slots = names, slots

    def __getitem__(self, name: str) -> Tensor:
        return self._slots[self._names.plain_name(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)
