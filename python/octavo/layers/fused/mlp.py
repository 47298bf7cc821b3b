"""The MLPs that a fused decode step can have: gated, or a mixture of gated experts.

Both add to the residual stream and leave the next norm's inputs on it (octavo.kernels.triton.skinny_linear).

Shape suffixes: t rows (one token each), m model dim, o features of a product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels.triton import moe
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.moe_experts import DecodeBuffers, Experts, ExpertScales
from octavo.kernels.triton.skinny_linear import (
    QuantizedRows,
    ResidualStream,
    SkinnyLinear,
    SplitScratch,
    add_residual,
    quantized,
    scaled_store,
)
from octavo.kernels.triton.skinny_table import MAX_ROWS
from octavo.layers.fused.base import ExpertWeights, GatedWeights, Weights


@dataclass(frozen=True, slots=True)
class MLPScratch:
    """Buffers that the MLPs of all layers take turns on; None where no layer needs them."""

    activated_to: Tensor | None
    split: SplitScratch
    experts: dict[torch.dtype, DecodeBuffers]
    """By the type of the experts' weights."""

    @classmethod
    def allocate(
        cls, mlps: Iterable[FusedMLP], split: SplitScratch, dtype: torch.dtype, device: torch.device
    ) -> MLPScratch:
        """For MLPs like these: those of one kind have equal sizes (some may be fp8 and some not)."""
        activated_to: Tensor | None = None
        mixtures: dict[torch.dtype, Experts] = {}
        for mlp in mlps:
            if isinstance(mlp, FusedGatedMLP) and activated_to is None:
                activated_to = torch.zeros(MAX_ROWS, mlp.down.k, dtype=dtype, device=device)
            elif isinstance(mlp, FusedSparseMLP):
                mixtures[mlp.experts.down_ehi.dtype] = mlp.experts
        return cls(activated_to, split, {kind: DecodeBuffers.allocate(experts) for kind, experts in mixtures.items()})


@dataclass(frozen=True, slots=True)
class MLPStep:
    """A step of one layer: what its MLP finds and what it leaves for the next norm."""

    stream: ResidualStream
    scratch: MLPScratch
    num_rows: int
    partials: int
    """Sums of squares a row that come with the stream."""
    eps: float
    gain_n: Tensor
    """Of the next norm."""


class FusedMLP(Protocol):
    """One layer's MLP with its norm."""

    def launches(self, step: MLPStep) -> list[Launch]:
        """residual += mlp(norm(residual)), and the next norm's inputs."""

    def num_partials(self, num_rows: int) -> int:
        """Sums of squares a row that it leaves."""

    def linears(self) -> list[SkinnyLinear]:
        """Its products that may need split scratch."""


@dataclass(frozen=True, slots=True)
class FusedGatedMLP:
    """gate_up with silu, and down: two kernels."""

    gate_up: SkinnyLinear
    down: SkinnyLinear

    def launches(self, step: MLPStep) -> list[Launch]:
        """See `FusedMLP.launches`."""
        stream, scratch = step.stream, step.scratch
        assert scratch.activated_to is not None
        activated_to = scratch.activated_to[: step.num_rows]
        return [
            *quantized(self.gate_up, stream.gained_mn[: step.num_rows]),
            scaled_store(self.gate_up, stream, activated_to, partials=step.partials, epilogue="silu", eps=step.eps),
            *quantized(self.down, activated_to),
            add_residual(self.down, activated_to, stream, step.gain_n, scratch.split),
        ]

    def num_partials(self, num_rows: int) -> int:
        """See `FusedMLP.num_partials`."""
        return self.down.num_tiles(num_rows)

    def linears(self) -> list[SkinnyLinear]:
        """See `FusedMLP.linears`."""
        return [self.gate_up, self.down]


@dataclass(frozen=True, slots=True)
class FusedSparseMLP:
    """Router, choice, and the chosen experts: four kernels for one row, six for more."""

    experts: Experts

    def launches(self, step: MLPStep) -> list[Launch]:
        """See `FusedMLP.launches`."""
        buffers = step.scratch.experts[self.experts.down_ehi.dtype]
        return moe.decode(
            self.experts, step.stream, buffers, step.num_rows,
            partials=step.partials, gain_n=step.gain_n, eps=step.eps,
        )  # fmt: skip

    def num_partials(self, num_rows: int) -> int:
        """See `FusedMLP.num_partials`."""
        return moe.num_partials(self.experts, num_rows)

    def linears(self) -> list[SkinnyLinear]:
        """See `FusedMLP.linears`."""
        return []


def make_linear(op: str, weights: Weights, rows: QuantizedRows | None) -> SkinnyLinear:
    """A product with its configurations chosen. `rows` is for fp8 ones."""
    if weights.scale_n is None:
        return SkinnyLinear.make(op, weights.weight_nk, weights.bias_n)
    return SkinnyLinear.make(op, weights.weight_nk, weights.bias_n, weights.scale_n, rows, weights.share)


def make_mlp(weights: GatedWeights | ExpertWeights, rows: QuantizedRows | None) -> FusedMLP:
    """A block's MLP, ready to launch."""
    if isinstance(weights, GatedWeights):
        return FusedGatedMLP(make_linear("gate_up", weights.gate_up, rows), make_linear("down", weights.down, rows))
    router, gate_up, down = weights.router_em, weights.gate_up_e2im, weights.down_emi
    scales: ExpertScales | None = None
    if weights.gate_up_scale_e2i is not None and weights.down_scale_em is not None:
        scales = ExpertScales.of(weights.gate_up_scale_e2i, weights.down_scale_em)
    experts = Experts(
        router, gate_up, down, weights.top_k, weights.renormalize,
        gate_up_bias_e2i=weights.gate_up_bias_e2i, down_bias_eh=weights.down_bias_em,
        limit=weights.limit, slope=weights.slope, scales=scales, router_bias_e=weights.router_bias_e,
    )  # fmt: skip
    return FusedSparseMLP(experts)
