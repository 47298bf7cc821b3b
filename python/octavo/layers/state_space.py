"""The Mamba 2 layer (Dao and Gu, 2024) over states that the cache holds: product, convolution, state space, gated norm,
product.

Shape suffixes: t tokens, m model dim, i inner, c convolved channels, k taps, h heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.attention.base import ForwardContext, StateSpec
from octavo.kernels.reference.causal_conv import tail_size
from octavo.kernels.reference.state_space import StateSpaceShape, StateSpaceWeights
from octavo.layers.parts import Parts
from octavo.layers.recurrent import operation


@dataclass(frozen=True, slots=True)
class StateSpaceSpec:
    """Sizes and options of a layer."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    """Every head of a group has the group's B and C."""
    taps: int
    """Of the causal convolution."""
    norm_eps: float
    has_bias: bool
    has_conv_bias: bool
    step_limits: tuple[float, float]
    """Of the time steps."""
    gating: Literal["before the norm", "after the norm", "no norm"] = "before the norm"
    """Where the gate comes."""
    has_out_bias: bool | None = None
    """Of the last product; None: as the first one's."""

    @property
    def shape(self) -> StateSpaceShape:
        """As the kernels take it."""
        return StateSpaceShape(self.num_heads, self.head_dim, self.state_dim, self.num_groups)

    @property
    def state_size(self) -> int:
        """Numbers of a state: of the heads, and the inputs that the convolution reads again."""
        return self.shape.state_size + tail_size(self.shape.channels, self.taps)


class StateSpaceMixer(nn.Module):
    """[t, m] -> [t, m]."""

    def __init__(self, spec: StateSpaceSpec, layer: int, parts: Parts) -> None:
        super().__init__()
        self.spec, self.prefix = spec, parts.prefix
        self.state = StateSpec(layer, spec.state_size)
        inner, channels, heads = spec.shape.inner, spec.shape.channels, spec.shape.num_heads
        self.sizes = [inner, channels, heads]

        self.project = parts.linear(spec.hidden_size, {"in_proj": sum(self.sizes)}, bias=spec.has_bias)
        has_out_bias = spec.has_bias if spec.has_out_bias is None else spec.has_out_bias
        self.out = parts.linear(inner, {"out_proj": spec.hidden_size}, bias=has_out_bias)
        self.tap_ck = parts.parameter(channels, spec.taps)
        self.gain_i = None if spec.gating == "no norm" else parts.parameter(inner)
        self.conv_bias_c = parts.parameter(channels) if spec.has_conv_bias else None
        self.step_bias_h, self.log_decay_h, self.skip_h = (parts.parameter(heads, kept=torch.float32) for _ in range(3))

    def forward(self, hidden_tm: Tensor, cos_sin_tr: Tensor | None, ctx: ForwardContext) -> Tensor:
        """[t, m] -> [t, m]. Nothing is rotated."""
        shape, device = self.spec.shape, hidden_tm.device
        state_bz, rows = ctx.kv_cache[self.state.layer], ctx.state_rows(self.state.layer)
        gate_ti, input_tc, step_th = self.project(hidden_tm).split(self.sizes, -1)
        convolve, scan = operation("causal_conv", device), operation("state_space", device)
        xbc_tc = convolve(input_tc, self.tap_ck, self.conv_bias_c, state_bz, rows, offset=shape.state_size)
        weights = StateSpaceWeights(self.step_bias_h, self.log_decay_h, self.skip_h, self.spec.step_limits)
        out_ti = scan(xbc_tc, step_th, weights, shape, state_bz, rows)
        result_tm: Tensor = self.out(self._gated(out_ti, gate_ti))
        return result_tm

    def _gated(self, out_ti: Tensor, gate_ti: Tensor) -> Tensor:
        spec = self.spec
        if self.gain_i is None:
            return (out_ti.float() * F.silu(gate_ti.float())).to(out_ti.dtype)
        norm, group = operation("gated_norm", out_ti.device), spec.shape.inner // spec.num_groups
        is_first = spec.gating == "before the norm"
        return norm(out_ti, gate_ti, self.gain_i, spec.norm_eps, group=group, gates_first=is_first)

    def slots(self) -> dict[str, Tensor]:
        """Checkpoint names below the layer's prefix."""
        found = {
            "conv1d.weight": self.tap_ck.unsqueeze(1),
            "dt_bias": self.step_bias_h,
            "A_log": self.log_decay_h,
            "D": self.skip_h,
        }
        if self.gain_i is not None:
            found["norm.weight"] = self.gain_i
        if self.conv_bias_c is not None:
            found["conv1d.bias"] = self.conv_bias_c
        named = {f"{self.prefix}.{name}": slot for name, slot in found.items()}
        return {**named, **self.project.slots(), **self.out.slots()}
