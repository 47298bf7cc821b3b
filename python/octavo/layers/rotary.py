"""Rotary position embedding: frequencies of each type, a table of cosines and sines, and the rotation of q and k.

Frequencies follow Transformers' modeling_rope_utils to the last operation (types default, linear, dynamic, llama3,
yarn). Rotation pairs dimension i with i + rotary_dim / 2 (GPT-NeoX order, which Hugging Face checkpoints use).

`dynamic` (NTK) frequencies depend on the sequence's length. A cached key was rotated once and can't follow a growing
sequence, so the table is made for the longest sequence that is served: served lengths up to the trained length use the
plain frequencies (as Transformers does), longer ones those that Transformers would use for a sequence of exactly that
length.

Shape suffixes: t tokens, n heads (of q or of k), d head dim, r rotary_dim, f rotary_dim / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.errors import ModelError


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """A rotary embedding. Fields past `factor` are read by the types that their names tell (models/config.py)."""

    type: str
    theta: float
    rotary_dim: int
    factor: float
    original_max_position: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def powers(theta: float, dim: int) -> Tensor:
    """theta ** (0/dim, 2/dim, …), fp32 [f]."""
    power_f: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    return power_f


def default_frequencies(spec: RotarySpec, length: int) -> tuple[Tensor, float]:
    return 1.0 / powers(spec.theta, spec.rotary_dim), 1.0


def linear_frequencies(spec: RotarySpec, length: int) -> tuple[Tensor, float]:
    return 1.0 / powers(spec.theta, spec.rotary_dim) / spec.factor, 1.0


def dynamic_frequencies(spec: RotarySpec, length: int) -> tuple[Tensor, float]:
    trained, dim = spec.original_max_position, spec.rotary_dim
    stretch = (spec.factor * max(length, trained) / trained) - (spec.factor - 1)
    return 1.0 / powers(spec.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def llama3_frequencies(spec: RotarySpec, length: int) -> tuple[Tensor, float]:
    frequency_f = 1.0 / powers(spec.theta, spec.rotary_dim)
    trained, low, high = spec.original_max_position, spec.low_freq_factor, spec.high_freq_factor
    wavelength_f = 2 * math.pi / frequency_f
    slowed_f = torch.where(wavelength_f > trained / low, frequency_f / spec.factor, frequency_f)
    smooth_f = (trained / wavelength_f - low) / (high - low)
    between_f = (1 - smooth_f) * slowed_f / spec.factor + smooth_f * slowed_f
    is_between_f = (wavelength_f >= trained / high) & (wavelength_f <= trained / low)
    return torch.where(is_between_f, between_f, slowed_f), 1.0


def yarn_frequencies(spec: RotarySpec, length: int) -> tuple[Tensor, float]:
    dim, log_theta = spec.rotary_dim, math.log(spec.theta)

    def dimension(rotations: float) -> float:
        return (dim * math.log(spec.original_max_position / (rotations * 2 * math.pi))) / (2 * log_theta)

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp_f = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    power_f = powers(spec.theta, dim)
    keep_f = 1 - ramp_f
    return 1.0 / (spec.factor * power_f) * (1 - keep_f) + 1.0 / power_f * keep_f, yarn_scale(spec)


def yarn_scale(spec: RotarySpec) -> float:
    """What cosines and sines are multiplied by."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(spec.factor) + 1.0 if spec.factor > 1 else 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)


FREQUENCIES: dict[str, Callable[[RotarySpec, int], tuple[Tensor, float]]] = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "dynamic": dynamic_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
}
"""Type -> (spec, longest served length) -> (angle per position, fp32 [f]; factor of cosines and sines)."""


def rotate(x_tnd: Tensor, cos_sin_tr: Tensor) -> Tensor:
    """Rotate the first rotary_dim dims of every head in fp32; x's dtype. `cos_sin_tr` is [cosines f | sines f]."""
    rotary_dim = cos_sin_tr.shape[-1]
    cos_t1f, sin_t1f = cos_sin_tr.unsqueeze(1).chunk(2, dim=-1)
    first_tnf, second_tnf = x_tnd[..., :rotary_dim].chunk(2, dim=-1)
    rotated_tnr = torch.cat(
        (first_tnf * cos_t1f - second_tnf * sin_t1f, second_tnf * cos_t1f + first_tnf * sin_t1f), dim=-1
    ).to(x_tnd.dtype)
    if rotary_dim == x_tnd.shape[-1]:
        return rotated_tnr
    return torch.cat((rotated_tnr, x_tnd[..., rotary_dim:]), dim=-1)


class Rotary(nn.Module):
    """The table [max_length, r] (fp32: cosines, then sines), gathered once a step and applied in every layer.

    ModelError for an unknown type or an odd rotary_dim.
    """

    table: Tensor

    def __init__(self, spec: RotarySpec, max_length: int, *, device: torch.device) -> None:
        super().__init__()
        if spec.type not in FREQUENCIES:
            raise ModelError(f"config.json: rope type {spec.type!r} is not one of {', '.join(FREQUENCIES)}")
        if spec.rotary_dim % 2:
            raise ModelError(f"config.json: the rotary part of a head has {spec.rotary_dim} dims; it must be even")
        self.spec = spec
        self.register_buffer("table", self._make_table(max_length, device), persistent=False)

    def _make_table(self, max_length: int, device: torch.device) -> Tensor:
        if device.type == "meta":
            return torch.empty((max_length, self.spec.rotary_dim), dtype=torch.float32, device=device)
        frequency_f, scale = FREQUENCIES[self.spec.type](self.spec, max_length)
        position = torch.arange(max_length, dtype=torch.float32, device=device)
        angle = position[:, None] * frequency_f.to(device)
        return torch.cat((angle.cos() * scale, angle.sin() * scale), dim=-1)

    def gather(self, position_t: Tensor) -> Tensor:
        """The step's rows of the table [t, r]."""
        return self.table[position_t]

    def forward(self, q_thd: Tensor, k_tgd: Tensor, cos_sin_tr: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated (q, k); `cos_sin_tr` comes from `gather`."""
        return rotate(q_thd, cos_sin_tr), rotate(k_tgd, cos_sin_tr)
