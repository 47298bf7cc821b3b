"""The activations of MLPs, by one name each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""`gelu_tanh` is gelu approximated by tanh."""
