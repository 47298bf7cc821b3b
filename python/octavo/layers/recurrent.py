"""The kernels of recurrent layers, by where tensors are: Triton's on CUDA devices, else their references in PyTorch.

Not here: the layers that call them (state_space.py, gated_delta.py), where states are (`ForwardContext.state_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from octavo.kernels.triton.target import runs_kernels


def operation(name: str, device: torch.device) -> Callable[..., Tensor]:
    """`causal_conv`, `state_space`, `gated_delta` or `gated_norm`; see `octavo.kernels.reference`."""
    return _load("triton" if runs_kernels(device) else "reference", name)


@cache
def _load(package: str, name: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = getattr(import_module(f"octavo.kernels.{package}.{name}"), name)
    return found
