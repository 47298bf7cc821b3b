"""The layer of gated delta nets (Yang, Kautz and Hatamizadeh, 2024) over states that the cache holds: product,
convolution, gated delta rule, gated norm, product.

Shape suffixes: t tokens, m model dim, i inner, c convolved channels, k taps, h value heads, d dims of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.attention.base import ForwardContext, StateSpec
from octavo.kernels.reference.causal_conv import tail_size
from octavo.kernels.reference.gated_delta import DeltaShape, DeltaWeights
from octavo.layers.linear import dense
from octavo.layers.parts import Parts
from octavo.layers.recurrent import operation


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Sizes and options of a layer."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Of the causal convolution, which has no bias."""
    norm_eps: float

    @property
    def shape(self) -> DeltaShape:
        """As the kernels take it."""
        return DeltaShape(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim)

    @property
    def state_size(self) -> int:
        """Numbers of a state: of the heads, and the inputs that the convolution reads again."""
        return self.shape.state_size + tail_size(self.shape.channels, self.taps)


class GatedDeltaMixer(nn.Module):
    """[t, m] -> [t, m]."""

    def __init__(self, spec: GatedDeltaSpec, layer: int, parts: Parts) -> None:
        super().__init__()
        self.spec, self.prefix = spec, parts.prefix
        self.state = StateSpec(layer, spec.state_size)
        shape = spec.shape
        self.sizes = [shape.channels, shape.inner, shape.num_value_heads, shape.num_value_heads]

        names = "in_proj_qkv", "in_proj_z"
        self.project = parts.linear(spec.hidden_size, dict(zip(names, self.sizes[:2], strict=True)))
        of_heads = dict(zip(("in_proj_b", "in_proj_a"), self.sizes[2:], strict=True))
        # Too few features for 8 bits to gain anything.
        self.project_heads = parts.linear(spec.hidden_size, of_heads, choose=dense)
        self.out = parts.linear(shape.inner, {"out_proj": spec.hidden_size})
        self.tap_ck, self.gain_d = parts.parameter(shape.channels, spec.taps), parts.parameter(shape.value_dim)
        heads = shape.num_value_heads
        self.step_bias_h, self.log_decay_h = (parts.parameter(heads, kept=torch.float32) for _ in range(2))

    def forward(self, hidden_tm: Tensor, cos_sin_tr: Tensor | None, ctx: ForwardContext) -> Tensor:
        """[t, m] -> [t, m]. Nothing is rotated."""
        spec, shape, device = self.spec, self.spec.shape, hidden_tm.device
        state_bz, rows = ctx.kv_cache[self.state.layer], ctx.state_rows(self.state.layer)
        input_tc, gate_ti = self.project(hidden_tm).split(self.sizes[:2], -1)
        strength_th, step_th = self.project_heads(hidden_tm).split(self.sizes[2:], -1)
        convolve, correct, norm = (operation(name, device) for name in ("causal_conv", "gated_delta", "gated_norm"))
        qkv_tc = convolve(input_tc, self.tap_ck, None, state_bz, rows, offset=shape.state_size)
        weights = DeltaWeights(self.step_bias_h, self.log_decay_h)
        out_ti = correct(qkv_tc, strength_th, step_th, weights, shape, state_bz, rows)
        result_tm: Tensor = self.out(
            norm(out_ti, gate_ti, self.gain_d, spec.norm_eps, group=shape.value_dim, gates_first=False)
        )
        return result_tm

    def slots(self) -> dict[str, Tensor]:
        """Checkpoint names below the layer's prefix."""
        found = {
            "conv1d.weight": self.tap_ck.unsqueeze(1),
            "norm.weight": self.gain_d,
            "dt_bias": self.step_bias_h,
            "A_log": self.log_decay_h,
        }
        named = {f"{self.prefix}.{name}": slot for name, slot in found.items()}
        return {**named, **self.project.slots(), **self.project_heads.slots(), **self.out.slots()}
