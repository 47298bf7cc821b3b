"""Angles per position of each type of rotary embedding, in numpy. Tables are made from them in rotary.py, and in the
embedded decoder.

They follow Transformers' modeling_rope_utils to the last operation (types default, linear, dynamic, llama3, yarn,
longrope, proportional).

`dynamic` (NTK) and `longrope` frequencies depend on the sequence's length. A cached key was rotated once and can't
follow a growing sequence, so the table is made for the longest sequence that is served: served lengths up to the
trained length use the frequencies of short ones (as Transformers does), longer ones those that Transformers would use
for a sequence of exactly that length.

Shape suffixes: f rotary_dim / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelError

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Angles of a rotary embedding. Fields past `theta` have a meaning only for the types that use them."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    """The length that the model was trained at before scaling (llama3, yarn, dynamic, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """None: the type's formula decides (yarn: from `factor` and the mscales)."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    """Wavelengths of longrope are multiplied by it up to the trained length, and by `long_factor` past it."""
    long_factor: tuple[float, ...] = ()
    axes: tuple[int, ...] = ()
    """Of each angle, by which position it turns where a token has three (0 time, 1 height, 2 width); empty: it has one.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec(Rope):
    """What is rotated by them."""

    rotary_dim: int
    proportion: float = 1.0
    """Of the angles of a head, which are not 0 (proportional)."""
    is_interleaved: bool = False
    """Neighbouring dims are rotated together (rotary.py)."""


Powers = Callable[[float, int], Floats]


def powers(theta: float, dim: int) -> Floats:
    """theta ** (0/dim, 2/dim, …), fp32 [f], correctly rounded: what torch computes differs in a few last bits."""
    exponent_f = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(theta, exponent_f.astype(np.float64)).astype(np.float32)


def default_frequencies(spec: RotarySpec, length: int, powers: Powers) -> tuple[Floats, float]:
    return np.float32(1.0) / powers(spec.theta, spec.rotary_dim), 1.0


def linear_frequencies(spec: RotarySpec, length: int, powers: Powers) -> tuple[Floats, float]:
    return np.float32(1.0) / powers(spec.theta, spec.rotary_dim) / np.float32(spec.factor), 1.0


def dynamic_frequencies(spec: RotarySpec, length: int, powers: Powers) -> tuple[Floats, float]:
    trained, dim = spec.original_max_position, spec.rotary_dim
    stretch = (spec.factor * max(length, trained) / trained) - (spec.factor - 1)
    return np.float32(1.0) / powers(spec.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def llama3_frequencies(spec: RotarySpec, length: int, powers: Powers) -> tuple[Floats, float]:
    frequency_f = np.float32(1.0) / powers(spec.theta, spec.rotary_dim)
    trained, low, high = spec.original_max_position, spec.low_freq_factor, spec.high_freq_factor
    wavelength_f = np.float32(2 * math.pi) / frequency_f
    slowed_f = np.where(wavelength_f > trained / low, frequency_f / np.float32(spec.factor), frequency_f)
    smooth_f = (np.float32(trained) / wavelength_f - np.float32(low)) / np.float32(high - low)
    between_f = (1 - smooth_f) * slowed_f / np.float32(spec.factor) + smooth_f * slowed_f
    is_between_f = (wavelength_f >= trained / high) & (wavelength_f <= trained / low)
    return np.where(is_between_f, between_f, slowed_f), 1.0


def yarn_frequencies(spec: RotarySpec, length: int, powers: Powers) -> tuple[Floats, float]:
    dim, log_theta = spec.rotary_dim, math.log(spec.theta)

    def dimension(rotations: float) -> float:
        return (dim * math.log(spec.original_max_position / (rotations * 2 * math.pi))) / (2 * log_theta)

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    place_f = np.arange(dim // 2, dtype=np.float32)
    ramp_f = ((place_f - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    power_f = powers(spec.theta, dim)
    keep_f = 1 - ramp_f
    slowed_f = np.float32(1.0) / (np.float32(spec.factor) * power_f)
    return slowed_f * (1 - keep_f) + np.float32(1.0) / power_f * keep_f, yarn_scale(spec)


def yarn_scale(spec: RotarySpec) -> float:
    """What cosines and sines are multiplied by."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(spec.factor) + 1.0 if spec.factor > 1 else 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)


def longrope_frequencies(spec: RotarySpec, length: int, powers: Powers) -> tuple[Floats, float]:
    trained, name = spec.original_max_position, "short_factor"
    if length > trained:
        name = "long_factor"
    stretch_f = np.array(getattr(spec, name), dtype=np.float32)
    if len(stretch_f) != spec.rotary_dim // 2:
        raise ModelError(f"config.json: {name} has {len(stretch_f)} numbers, not {spec.rotary_dim // 2}")
    scale = spec.attention_factor
    if scale is None:
        scale = math.sqrt(1 + math.log(spec.factor) / math.log(trained)) if spec.factor > 1 else 1.0
    return np.float32(1.0) / (stretch_f * powers(spec.theta, spec.rotary_dim)), scale


def proportional_frequencies(spec: RotarySpec, length: int, powers: Powers) -> tuple[Floats, float]:
    turning = int(spec.proportion * spec.rotary_dim // 2)
    frequency_f = np.zeros(spec.rotary_dim // 2, dtype=np.float32)
    frequency_f[:turning] = np.float32(1.0) / powers(spec.theta, spec.rotary_dim)[:turning]
    return frequency_f / np.float32(spec.factor), 1.0


FREQUENCIES: dict[str, Callable[[RotarySpec, int, Powers], tuple[Floats, float]]] = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "dynamic": dynamic_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
    "longrope": longrope_frequencies,
    "proportional": proportional_frequencies,
}
"""Type -> (spec, longest served length, powers) -> (angle per position, fp32 [f]; factor of cosines and sines)."""


def frequencies(spec: RotarySpec, length: int, powers: Powers = powers) -> tuple[Floats, float]:
    """Of any type. ModelError for an unknown one or an odd rotary_dim."""
    if spec.type not in FREQUENCIES:
        raise ModelError(f"config.json: rope type {spec.type!r} is not one of {', '.join(FREQUENCIES)}")
    if spec.rotary_dim % 2:
        raise ModelError(f"config.json: the rotary part of a head has {spec.rotary_dim} dims; it must be even")
    return FREQUENCIES[spec.type](spec, length, powers)
