"""The seam between a decoder and kernels that run its decode steps as a whole, and what such kernels are made from.

Shape suffixes: t tokens (one a row), s sampled rows, v vocabulary, m model dim, d head dim, e experts, i inner dim of
an expert, n and k as a weight's rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.attention.base import AttentionSpec, ForwardContext


class DecodeKernels(Protocol):
    """Runs the steps that it accepts, instead of the decoder's modules and with their results but for rounding."""

    def accepts(self, ctx: ForwardContext) -> bool:
        """Whether `forward` can run the step."""

    def forward(self, token_id_t: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states [t, m] after the final norm, valid until the next call. Safe in a CUDA graph capture."""

    def accepts_logits(self, hidden_sm: Tensor) -> bool:
        """Whether `logits` can score the rows."""

    def logits(self, hidden_sm: Tensor) -> Tensor:
        """Logits fp32 [s, v]."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A product's matrix [n, k] and bias [n]; a matrix in e4m3 has scales (fp32) of its rows, or of squares, which so
    many rows `share`."""

    weight_nk: Tensor
    bias_n: Tensor | None
    scale_n: Tensor | None = None
    share: int = 0


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """A gated MLP, gate above up."""

    gate_up: Weights
    down: Weights


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A mixture of gated MLPs: of each row the `top_k` experts that the router's softmax likes best, their weights
    divided by their sum if `renormalize`."""

    router_em: Tensor
    gate_up_e2im: Tensor
    down_emi: Tensor
    top_k: int
    renormalize: bool
    gate_up_scale_e2i: Tensor | None = None
    down_scale_em: Tensor | None = None
    """fp32, of matrices in e4m3: of channels, or (with an axis more) of square blocks."""
    router_bias_e: Tensor | None = None
    gate_up_bias_e2i: Tensor | None = None
    down_bias_em: Tensor | None = None
    limit: float = 0.0
    slope: float = 1.0
    """Of a clamped activation (octavo.kernels.triton.moe_experts); 0: it is not."""


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One pre-norm block with rotary attention and an MLP (q, k, v stacked)."""

    attention: AttentionSpec
    norm_eps: float
    input_gain_m: Tensor
    qkv: Weights
    q_gain_d: Tensor | None
    k_gain_d: Tensor | None
    o: Weights
    mlp_gain_m: Tensor
    mlp: GatedWeights | ExpertWeights
    sink_h: Tensor | None = None

    def products(self) -> list[Weights]:
        """All but a mixture's."""
        mlp = self.mlp
        return [self.qkv, self.o, *([mlp.gate_up, mlp.down] if isinstance(mlp, GatedWeights) else [])]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder. `rotary_table` fp32 [positions, d]: cosines, then sines."""

    embed_vm: Tensor
    blocks: list[BlockWeights]
    final_gain_m: Tensor
    head_vm: Tensor
    rotary_table: Tensor
