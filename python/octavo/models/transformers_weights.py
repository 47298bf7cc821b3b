"""Checkpoint tensors into a Transformers model: its state by name, tied names, and the renaming rules of its class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from octavo.layers.quant.fp8_tensors import as_kept
from octavo.layers.quant.stored import Quantization
from octavo.models.transformers_names import CheckpointNames
from octavo.models.weights import load_strict


class Checkpoint:
    """Where each tensor goes. Made while the model is in one piece."""

    def __init__(self, causal: Any, quantization: Quantization | None) -> None:
        self._names = CheckpointNames(causal)
        self._quantization = quantization
        self._slots: dict[str, Tensor] = {}
        self._tied: dict[str, str] = {}
        owners: dict[int, str] = {}
        state, followers = causal.state_dict(keep_vars=True), causal.all_tied_weights_keys
        for name in sorted(state, key=lambda name: name in followers):  # checkpoints have the names that lead
            tensor = state[name]
            owner = owners.setdefault(id(tensor), name)
            if owner == name:
                self._slots[name] = tensor
            else:
                self._tied[name] = owner

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every tensor; ModelError as `load_strict`."""
        load_strict(self._slots, self._tied, self._names.convert(as_kept(tensors, {}, self._quantization)))
