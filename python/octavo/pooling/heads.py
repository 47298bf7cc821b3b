"""From hidden states to one vector a text: poolings, the linear layers after them, normalization.

Shapes: b texts, s positions of the longest, h hidden, d dimensions. Padding is on the right; `mask_bs` is 1 for tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from octavo.errors import ModelError
from octavo.models.sources import read_json
from octavo.pooling.recipe import Recipe

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": functional.relu,
    "GELU": functional.gelu,
    "Sigmoid": torch.sigmoid,
}


def last_token(hidden_bsh: Tensor, mask_bs: Tensor) -> Tensor:
    """[b, h]: the state of each text's last token."""
    rows = torch.arange(len(hidden_bsh), device=hidden_bsh.device)
    return hidden_bsh[rows, mask_bs.sum(1) - 1]


def _sum(hidden_bsh: Tensor, mask_bs: Tensor) -> Tensor:
    return (hidden_bsh * mask_bs.unsqueeze(-1)).sum(1)


def _weighted_mean(hidden_bsh: Tensor, mask_bs: Tensor) -> Tensor:
    """Later tokens count more: weight 1, 2, 3 …"""
    weight_bs = mask_bs * torch.arange(1, mask_bs.shape[1] + 1, device=mask_bs.device)
    return _sum(hidden_bsh, weight_bs) / weight_bs.sum(1, keepdim=True)


POOLERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda hidden_bsh, mask_bs: hidden_bsh[:, 0],
    "mean": lambda hidden_bsh, mask_bs: _sum(hidden_bsh, mask_bs) / mask_bs.sum(1, keepdim=True),
    "max": lambda hidden_bsh, mask_bs: hidden_bsh.masked_fill(mask_bs.unsqueeze(-1) == 0, -torch.inf).amax(1),
    "mean_sqrt_len": lambda hidden_bsh, mask_bs: _sum(hidden_bsh, mask_bs) / mask_bs.sum(1, keepdim=True).sqrt(),
    "weighted_mean": _weighted_mean,
    "last": last_token,
}


class Dense:
    """sentence-transformers' linear layer after the pooling; computes in fp32."""

    def __init__(self, folder: Path, device: str) -> None:
        config = read_json(folder / "config.json") or {}
        name = str(config.get("activation_function", "Identity")).rpartition(".")[2]
        if name not in ACTIVATIONS:
            raise ModelError(f"{folder}: activation {name} is not one of {', '.join(ACTIVATIONS)}")
        file = folder / "model.safetensors"
        if not file.is_file():
            raise ModelError(f"{folder}: has no model.safetensors (pickled weights are not read)")
        tensors = load_file(file, device=device)
        self._activation = ACTIVATIONS[name]
        self._weight_dh = tensors["linear.weight"].float()
        self._bias_d = tensors["linear.bias"].float() if "linear.bias" in tensors else None

    @property
    def num_outputs(self) -> int:
        return len(self._weight_dh)

    def __call__(self, rows_bh: Tensor) -> Tensor:
        return self._activation(functional.linear(rows_bh, self._weight_dh, self._bias_d))


class EmbeddingHead:
    """The whole way from hidden states to an embedding."""

    def __init__(self, recipe: Recipe, hidden_size: int, device: str) -> None:
        unknown = [mode for mode in recipe.modes if mode not in POOLERS]
        if unknown:
            raise ModelError(f"pooling {unknown[0]!r} is not one of {', '.join(POOLERS)}")
        self._poolers = [POOLERS[mode] for mode in recipe.modes]
        self._dense: Sequence[Dense] = [Dense(folder, device) for folder in recipe.dense]
        self._normalize = recipe.normalize
        self.num_outputs = self._dense[-1].num_outputs if self._dense else hidden_size * len(self._poolers)

    def __call__(self, hidden_bsh: Tensor, mask_bs: Tensor) -> Tensor:
        """[b, d] in fp32."""
        hidden_bsh = hidden_bsh.float()
        rows_bd = torch.cat([pool(hidden_bsh, mask_bs) for pool in self._poolers], dim=1)
        for layer in self._dense:
            rows_bd = layer(rows_bd)
        return functional.normalize(rows_bd, dim=1) if self._normalize else rows_bd


def num_positions(model: nn.Module, max_position: int) -> int:
    """Longest text that position embeddings allow: RoBERTa's kind begins to count after the padding id."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return max_position
