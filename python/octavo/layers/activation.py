"""Activations of MLPs, and of gated ones act(gate) * up, from one fused [t, 2 * i] input (gate first)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.errors import ModelError
from octavo.kernels.reference.activations import ACTIVATIONS as FUNCTIONS
from octavo.kernels.reference.moe import clamped
from octavo.layers.activation_names import KINDS
from octavo.layers.parts import Parts

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {name: FUNCTIONS[kind] for name, kind in KINDS.items()}
"""By their names in config.json."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """By its name. ModelError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json: hidden_act {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gated(gate_up_t2i: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """act(gate) * up: [t, 2 * i] -> [t, i]."""
    gate_ti, up_ti = gate_up_t2i.chunk(2, dim=-1)
    return act(gate_ti) * up_ti


class GatedActivation(nn.Module):
    """`gated` with a named activation; a kernel may take the place of `run` (fused/joins.py). ModelError for an unknown
    name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.run: Callable[[Tensor], Tensor] = partial(gated, act=activation(name))

    def forward(self, gate_up_t2i: Tensor) -> Tensor:
        """[t, 2 * i] -> [t, i]."""
        return self.run(gate_up_t2i)


class LearnedActivation(nn.Module):
    """xIELU (Huang and Schlag 2024): a parabola above 0, an exponential below, their slopes learned. The parameters are
    a checkpoint's."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = parts.parameter(1), parts.parameter(1)
        self.beta, self.eps = parts.parameter(), parts.parameter()

    def forward(self, x: Tensor) -> Tensor:
        """Of every number."""
        above = F.softplus(self.alpha_p) * x * x + self.beta * x
        below = (torch.expm1(torch.minimum(x, self.eps)) - x) * (self.beta + F.softplus(self.alpha_n)) + self.beta * x
        return torch.where(x > 0, above, below)

    def slots(self, name: str) -> dict[str, Tensor]:
        """Where the tensors of a checkpoint's activation `name` go."""
        return {f"{name}.{key}": parameter for key, parameter in self.named_parameters()}


class ClampedActivation(nn.Module):
    """gpt-oss's: gate * sigmoid(slope * gate) * (up + 1), both clamped first (the gate from above only)."""

    def __init__(self, limit: float, slope: float) -> None:
        super().__init__()
        self.limit, self.slope = limit, slope

    def forward(self, gate_up_t2i: Tensor) -> Tensor:
        """[t, 2 * i] -> [t, i]."""
        gate_ti, up_ti = gate_up_t2i.chunk(2, dim=-1)
        return clamped(gate_ti, up_ti, self.limit, self.slope)
