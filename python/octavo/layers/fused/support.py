"""Which decoders, on which devices, the fused decode kernels can run. Pure; loads no kernel.

What depends on a step (its rows, the cache's block size) is asked of the kernels: `DecodeKernels.accepts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.attention.base import AttentionSpec
from octavo.kernels.triton.moe_table import MAX_COMPARED, supports
from octavo.kernels.triton.skinny_table import BUCKETS, choose
from octavo.kernels.triton.target import capability, has_dependent_launches, runs_kernels

ACTIVATIONS = ("silu", "swish")
HEAD_DIMS = (64, 128)
MAX_GROUP = 16


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What the kernels ask of a decoder."""

    hidden_size: int
    intermediate_size: int
    """Of plain MLPs; 0: there are none."""
    hidden_act: str
    rotary_dim: int
    attention: tuple[AttentionSpec, ...]
    """One a layer."""
    is_dense: bool
    """Linear layers keep plain matrices of `dtype`, or of e4m3 with scales of rows or squares."""
    dtype: torch.dtype
    fp8_shares: frozenset[int] = frozenset()
    """Of matrices in e4m3: how many rows share scales of squares (0: a row has one)."""
    experts: tuple[int, int, int] | None = None
    """(number, chosen, intermediate size) of mixtures of experts."""
    extras: tuple[str, ...] = ()
    """What else the decoder has that the kernels know nothing of, in words."""


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What the kernels ask of a device."""

    kind: str
    capability: tuple[int, int] = (0, 0)
    has_dependent_launches: bool = False
    """A kernel may be launched before the one ahead of it has ended (PDL)."""

    @classmethod
    def of(cls, device: torch.device) -> DeviceTraits:
        """Of a device that is present, or that kernels are compiled for."""
        kind = "cuda" if runs_kernels(device) else device.type
        return cls(kind, capability(device), has_dependent_launches(device))


def obstacle(shape: DecoderShape, device: DeviceTraits) -> str | None:
    """Why the fused kernels can't run the decoder on the device, in a few words; None: they can."""
    if device.kind != "cuda" or device.capability[0] != 9:
        return "they need a Hopper GPU (sm_90)"
    if shape.dtype != torch.bfloat16 or not shape.is_dense:
        return "they need bfloat16 weights"
    if shape.extras:
        return f"they have no {shape.extras[0]}"
    if shape.hidden_act not in ACTIVATIONS:
        return f"they know the activation silu, not {shape.hidden_act}"
    heads = {(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in shape.attention}
    if len(heads) != 1 or any(spec.soft_cap or not spec.is_plain for spec in shape.attention):
        return "they need equal heads in all layers, without a soft cap, chunks or latents"
    num_heads, num_kv_heads, dim = heads.pop()
    if dim not in HEAD_DIMS or shape.rotary_dim != dim:
        return f"they need heads of 64 or 128 dims, all rotated, not {dim} with {shape.rotary_dim} rotated"
    if num_heads // num_kv_heads > MAX_GROUP:
        return f"they need at most {MAX_GROUP} query heads a KV head"
    hidden, inner = shape.hidden_size, shape.intermediate_size
    products = {
        "qkv": ((num_heads + 2 * num_kv_heads) * dim, hidden),
        "o": (hidden, num_heads * dim),
    }
    if inner:
        products |= {"gate_up": (inner, hidden), "down": (hidden, inner)}
    if shape.experts is not None:
        count, chosen, inner = shape.experts
        if count > MAX_COMPARED or not supports(hidden, inner, count, chosen):
            return f"no kernel runs {count} experts of {hidden} x {inner}"
    kinds = [(False, 0), *((True, share) for share in shape.fp8_shares)]
    for op, (n, k) in products.items():
        if any(choose(op, n, k, bucket, fp8=fp8, share=s) is None for bucket in BUCKETS for fp8, s in kinds):
            return f"no configuration multiplies {op}'s matrix of {n} x {k} (sizes must be multiples of 128)"
    return None
