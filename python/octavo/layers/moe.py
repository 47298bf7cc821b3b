"""Mixtures of experts: a router picks a few MLPs, gated or not, for each token; their weighted outputs are added.

Experts are stacked in one matrix a kind, as kernels want them: gate above up [e, 2 i, m] (without gates:
up [e, i, m]), down [e, m, i]. On CUDA the
kernels of octavo.kernels.triton.moe run them (nothing is read back, so CUDA graphs can capture it); elsewhere a loop
over the experts that have rows. In fp8 they are e4m3 with a scale an output channel, as linear layers are
(quant/fp8.py), or with a checkpoint's scales of square blocks, where kernels run them; elsewhere their rounded values
are kept in the model's dtype.

Shape suffixes: t tokens, m model dim, e experts, j choices of a token, i inner dim, f flat (token, choice) pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.kernels.reference.moe import Rule, choose
from octavo.kernels.reference.quantize_rows import FP8, dequantize_rows
from octavo.kernels.reference.squares import SIDE, dequantize_squares
from octavo.kernels.triton.moe_table import supports, supports_eight, supports_squares
from octavo.kernels.triton.target import runs_kernels
from octavo.layers.activation import ClampedActivation, GatedActivation, activation
from octavo.layers.activation_names import KINDS
from octavo.layers.fused.base import ExpertWeights
from octavo.layers.linear import Choice, Form
from octavo.layers.parts import Parts
from octavo.layers.quant import fp8
from octavo.layers.quant.fp8_squares import SQUARES
from octavo.layers.sparse_mixer import sparse_mixer

if TYPE_CHECKING:
    from octavo.kernels.triton.moe_experts import Experts


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits become experts and their weights."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    """The chosen experts' weights are divided by their sum."""
    scale: float = 1.0
    """Weights are multiplied by it in the end."""
    groups: int = 1
    top_groups: int = 1
    """Of `groups` runs of experts, only the best so many are chosen from."""
    group_score: Literal["best", "best two"] = "best"
    """What ranks a group: its best expert, or the sum of its best two."""
    has_bias: bool = False
    """Logits have a bias."""
    has_choice_bias: bool = False
    """Scores have a bias (fp32) when experts are chosen, but not in their weights."""
    is_exact: bool = False
    """Logits are computed in fp32."""
    weighs_input: bool = False
    """What an expert reads is multiplied by its weight, instead of what it gives."""
    jitter: float = 0.0
    """Experts are chosen as `sparse_mixer` does, which this is a number of; 0: they are not."""

    @property
    def rule(self) -> Rule:
        """Without what concerns the router's product and the experts' input."""
        sizes = self.groups, self.top_groups
        return Rule(self.score == "sigmoid", self.renormalize, self.scale, *sizes, self.group_score == "best two")

    @property
    def is_plain(self) -> bool:
        """Top k of a softmax, which kernels do for decode steps as a whole."""
        return self == Routing(renormalize=self.renormalize, has_bias=self.has_bias, is_exact=self.is_exact)


@dataclass(frozen=True, slots=True)
class Clamped:
    """gpt-oss's activation, gate * sigmoid(slope * gate) * (up + 1), both clamped to `limit` first."""

    limit: float
    slope: float


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture's sizes, how tokens are routed, and what its experts are."""

    num_experts: int
    top_k: int
    intermediate_size: int
    routing: Routing = Routing()
    has_biases: bool = False
    """Of the experts' products."""
    clamped: Clamped | None = None
    """Instead of the model's activation."""
    is_gated: bool = True
    """Otherwise experts are down(act(up))."""

    @property
    def num_matrices(self) -> int:
        """That the first product has: gate and up, or up alone."""
        return 2 if self.is_gated else 1

    @property
    def is_plain(self) -> bool:
        """Nothing but what Mixtral, Qwen and gpt-oss have."""
        plain = Routing(renormalize=self.routing.renormalize, has_bias=self.routing.has_bias)
        return self.routing == plain and self.is_gated


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the parts of a mixture, below a block: one tensor an expert, or all in one."""

    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    merged_router: str = "mlp.gate"
    merged_gate_up: str = "mlp.experts.gate_up_proj"
    merged_down: str = "mlp.experts.down_proj"
    """What holds all experts (Transformers 5)."""


@dataclass(slots=True)
class ExpertProduct:
    """See `layers.linear.Product`: one kind of matrix, of all experts."""

    in_features: int
    out_features: int
    shards: dict[str, int]


@dataclass(frozen=True, slots=True)
class Merged:
    """A checkpoint tensor that takes the place of several."""

    slot: Tensor
    names: tuple[str, ...]

    def below(self, prefix: str) -> Merged:
        """The same, its names under a prefix."""
        return Merged(self.slot, tuple(f"{prefix}.{name}" for name in self.names))


def experts_activation(spec: ExpertsSpec, hidden_act: str) -> tuple[Callable[[Tensor], Tensor], str]:
    """(what follows a mixture's first product, its name for kernels; the clamped one has no name)."""
    if spec.clamped is not None:
        return ClampedActivation(spec.clamped.limit, spec.clamped.slope), "silu"
    return GatedActivation(hidden_act) if spec.is_gated else activation(hidden_act), KINDS[hidden_act]


class SparseMLP(nn.Module):
    """router and experts; see `ExpertsSpec`."""

    def __init__(self, hidden_size: int, spec: ExpertsSpec, hidden_act: str, names: ExpertNames, parts: Parts) -> None:
        super().__init__()
        self.spec, self.names, self.dtype = spec, names, parts.dtype
        count, inner = spec.num_experts, spec.intermediate_size
        first_inner = spec.num_matrices * inner
        self.act, self.act_kind = experts_activation(spec, hidden_act)
        knows_input = not spec.routing.weighs_input or spec.top_k == 1
        self.has_kernels = knows_input and supports(hidden_size, inner, count, spec.top_k)
        self.form = self._form(parts.choose, hidden_size) if self.has_kernels else "wide"
        is_fp8, side = self.form != "wide", SIDE if self.form == "squares" else 1
        parameter, number = parts.parameter, FP8 if is_fp8 else parts.dtype
        routing, exact = spec.routing, torch.float32 if spec.routing.is_exact else parts.dtype
        self.router = parameter(count, hidden_size, kept=exact)
        self.router_bias = parameter(count, kept=exact) if routing.has_bias else None
        self.choice_bias = parameter(count, kept=torch.float32) if routing.has_choice_bias else None
        self.gate_up = parameter(count, first_inner, hidden_size, kept=number)
        self.down = parameter(count, hidden_size, inner, kept=number)
        self.gate_up_scale: nn.Parameter | None = None
        self.down_scale: nn.Parameter | None = None
        if is_fp8:
            columns = ((hidden_size // side,), (inner // side,)) if side > 1 else ((), ())
            self.gate_up_scale = parameter(count, first_inner // side, *columns[0], kept=torch.float32)
            self.down_scale = parameter(count, hidden_size // side, *columns[1], kept=torch.float32)
        self.gate_up_bias = parameter(count, first_inner) if spec.has_biases else None
        self.down_bias = parameter(count, hidden_size) if spec.has_biases else None
        self.score: Callable[[Tensor, Tensor], Tensor] = F.linear
        """The router's product; replaced where products must be batch-invariant (experts' are, on CUDA)."""

    def _form(self, choose: Choice, hidden_size: int) -> Form:
        """How the experts' matrices are to be kept, as far as kernels can multiply them so."""
        names, spec = self.names, self.spec
        prefixes = [f"{names.experts}.{expert}" for expert in range(spec.num_experts)]
        halves = [f"{prefix}.{part}" for prefix in prefixes for part in self._parts()]
        downs = [f"{prefix}.{names.down}" for prefix in prefixes]
        shards = dict.fromkeys(halves, spec.intermediate_size) | dict.fromkeys(downs, hidden_size)
        form = choose(ExpertProduct(hidden_size, spec.intermediate_size, shards)).form
        if form == "squares" and not supports_squares(hidden_size, spec.intermediate_size):
            form = "channels"
        return form if supports_eight(hidden_size, spec.intermediate_size) else "wide"

    def _parts(self) -> tuple[str, ...]:
        """What a checkpoint calls the first product's matrices."""
        return (self.names.gate, self.names.up) if self.spec.is_gated else (self.names.up,)

    def finish(self) -> None:
        """Once, when the slots are filled: where the device has no fp8 products, experts become dense ones with the
        weights' values."""
        if self.gate_up_scale is None or self.down_scale is None or fp8.multiplies_fp8(self.down.device):
            return
        for name, scale in (("gate_up", self.gate_up_scale), ("down", self.down_scale)):
            number = getattr(self, name)
            wide = number.new_empty(number.shape, dtype=self.dtype)
            for expert in range(self.spec.num_experts):
                part = slice(expert, expert + 1)
                if self.form == "squares":
                    wide[part] = dequantize_squares(number[part], scale[part])
                else:
                    wide[expert] = dequantize_rows(number[expert], scale[expert])
            setattr(self, name, nn.Parameter(wide, requires_grad=False))
        self.gate_up_scale = self.down_scale = None

    def forward(self, hidden_tm: Tensor) -> Tensor:
        """[t, m] -> [t, m]."""
        logit_te = self.score(hidden_tm.to(self.router.dtype), self.router)
        if self.router_bias is not None:
            logit_te = logit_te + self.router_bias
        if self.has_kernels and runs_kernels(hidden_tm.device):
            return self._by_kernels(hidden_tm, logit_te)
        return self._by_expert(hidden_tm, *self._choose(logit_te, choose))

    def _choose(self, logit_te: Tensor, by_rule: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Each token's experts, and their weights."""
        routing, top_k = self.spec.routing, self.spec.top_k
        if routing.jitter:
            return sparse_mixer(logit_te, top_k, routing.jitter)
        return by_rule(logit_te, top_k, routing.rule, self.choice_bias)

    def _by_kernels(self, hidden_tm: Tensor, logit_te: Tensor) -> Tensor:
        """Nothing is read back."""
        from octavo.kernels.triton.moe import mix  # these load Triton
        from octavo.kernels.triton.moe_choose import choose as choose_experts

        experts, routing = self.for_kernels(self.router), self.spec.routing
        if routing.is_plain:
            return mix(experts, hidden_tm, logit_te)
        expert_tj, weight_tj = self._choose(logit_te, choose_experts)
        if routing.weighs_input:  # there is one expert a token
            hidden_tm, weight_tj = hidden_tm * weight_tj.to(hidden_tm.dtype), torch.ones_like(weight_tj)
        return mix(experts, hidden_tm, (expert_tj, weight_tj))

    def for_kernels(self, router_em: Tensor) -> Experts:
        """The mixture as kernels take it; of the router, only its shape counts where experts are chosen already."""
        from octavo.kernels.triton.moe_experts import Experts, ExpertScales  # loads Triton

        scales: ExpertScales | None = None
        if self.gate_up_scale is not None and self.down_scale is not None:
            scales = ExpertScales.of(self.gate_up_scale, self.down_scale)
        clamp = self.spec.clamped or Clamped(0.0, 1.0)
        return Experts(
            router_em,
            self.gate_up,
            self.down,
            self.spec.top_k,
            self.spec.routing.renormalize,
            self.gate_up_bias,
            self.down_bias,
            clamp.limit,
            clamp.slope,
            scales,
            activation=self.act_kind,
            is_gated=self.spec.is_gated,
        )

    def _by_expert(self, hidden_tm: Tensor, expert_tj: Tensor, weight_tj: Tensor) -> Tensor:
        """A loop over experts, each with its tokens; asks the device how many they are."""
        spec, share_f = self.spec, weight_tj.flatten().to(hidden_tm.dtype)
        order_f = expert_tj.flatten().argsort(stable=True)
        sizes = expert_tj.flatten().bincount(minlength=spec.num_experts).tolist()
        out_fm = hidden_tm.new_empty(order_f.shape[0], hidden_tm.shape[1])
        for expert, pair_f in enumerate(torch.split(order_f, sizes)):
            if len(pair_f):
                rows, share_f1 = hidden_tm[pair_f // spec.top_k], share_f[pair_f, None]
                first, second = (None if b is None else b[expert] for b in (self.gate_up_bias, self.down_bias))
                if spec.routing.weighs_input:
                    rows = rows * share_f1
                out = F.linear(self.act(F.linear(rows, self.gate_up[expert], first)), self.down[expert], second)
                out_fm[pair_f] = out if spec.routing.weighs_input else out * share_f1
        return out_fm.view(-1, spec.top_k, out_fm.shape[1]).sum(1)

    def slots(self) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes, names below the block."""
        names, num_matrices = self.names, self.spec.num_matrices
        found: dict[str, Tensor] = {f"{names.router}.weight": self.router}
        if self.router_bias is not None:
            found[f"{names.router}.bias"] = self.router_bias
        if self.choice_bias is not None:
            found[names.choice_bias] = self.choice_bias
        if self.gate_up_bias is not None and self.down_bias is not None:
            found[f"{names.merged_gate_up}_bias"] = self.gate_up_bias
            found[f"{names.merged_down}_bias"] = self.down_bias
        for expert in range(self.spec.num_experts):
            prefix = f"{names.experts}.{expert}"
            parts = [f"{prefix}.{part}" for part in self._parts()]
            found |= zip((f"{part}.weight" for part in parts), self.gate_up[expert].chunk(num_matrices), strict=True)
            found[f"{prefix}.{names.down}.weight"] = self.down[expert]
            if self.gate_up_scale is not None and self.down_scale is not None:
                kind = SQUARES if self.form == "squares" else "weight_scale"
                scales = self.gate_up_scale[expert].chunk(num_matrices)
                found |= zip((f"{part}.{kind}" for part in parts), scales, strict=True)
                found[f"{prefix}.{names.down}.{kind}"] = self.down_scale[expert]
        return found

    def merged_slots(self) -> dict[str, Merged]:
        """Where tensors of checkpoints that keep all experts in one go."""
        names = self.names
        prefixes = [f"{names.experts}.{expert}" for expert in range(self.spec.num_experts)]
        halves = tuple(f"{prefix}.{part}.weight" for prefix in prefixes for part in self._parts())
        downs = tuple(f"{prefix}.{names.down}.weight" for prefix in prefixes)
        found = {names.merged_gate_up: Merged(self.gate_up, halves), names.merged_down: Merged(self.down, downs)}
        if self.gate_up_scale is not None and self.down_scale is not None and self.form == "channels":
            scales = (names.merged_gate_up, self.gate_up_scale, halves), (names.merged_down, self.down_scale, downs)
            found |= {f"{name}_scale": Merged(slot, tuple(f"{n}_scale" for n in of)) for name, slot, of in scales}
        if names.merged_router != names.router:
            found[f"{names.merged_router}.weight"] = Merged(self.router, (f"{names.router}.weight",))
        return found

    def weights(self) -> ExpertWeights:
        """The parameters, by what they are for."""
        spec = self.spec
        scales = self.gate_up_scale, self.down_scale
        biases = self.router_bias, self.gate_up_bias, self.down_bias
        how = (spec.clamped.limit, spec.clamped.slope) if spec.clamped else (0.0, 1.0)
        matrices = self.router, self.gate_up, self.down
        return ExpertWeights(*matrices, spec.top_k, spec.routing.renormalize, *scales, *biases, *how)
