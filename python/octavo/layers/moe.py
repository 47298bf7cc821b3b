"""Mixtures of experts: a router picks a few gated MLPs for each token; their weighted outputs are added.

Experts are stacked in one matrix a kind, as kernels want them: gate above up [e, 2 i, m], down [e, m, i]. On CUDA the
kernels of octavo.kernels.triton.moe run them (nothing is read back, so CUDA graphs can capture it); elsewhere a loop
over the experts that have rows.

Shape suffixes: t tokens, m model dim, e experts, j choices of a token, i inner dim, f flat (token, choice) pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.kernels.triton.moe_table import supports
from octavo.kernels.triton.target import runs_kernels
from octavo.layers.activation import GatedActivation
from octavo.layers.fused.base import ExpertWeights

SILU = ("silu", "swish")


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture's sizes, and how tokens are routed."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    """The chosen experts' weights are divided by their sum."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a checkpoint calls the parts of a mixture, below a block: one tensor an expert, or all in one."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    merged_router: str = "mlp.gate"
    merged: str = "mlp.experts"
    """Prefix of `gate_up_proj` and `down_proj`, which hold all experts (Transformers 5)."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A checkpoint tensor that takes the place of several."""

    slot: Tensor
    names: tuple[str, ...]

    def below(self, prefix: str) -> Merged:
        """The same, its names under a prefix."""
        return Merged(self.slot, tuple(f"{prefix}.{name}" for name in self.names))


def route(logit_te: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """(experts int64 [t, j], their weights fp32 [t, j]) from the router's logits."""
    weight_tj, expert_tj = logit_te.float().softmax(-1).topk(top_k, dim=-1)
    if renormalize:
        weight_tj = weight_tj / weight_tj.sum(-1, keepdim=True)
    return expert_tj, weight_tj


class SparseMLP(nn.Module):
    """router and experts; see `ExpertsSpec`."""

    def __init__(
        self,
        hidden_size: int,
        spec: ExpertsSpec,
        hidden_act: str,
        names: ExpertNames,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self.names = spec, names
        count, inner = spec.num_experts, spec.intermediate_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.router = parameter(count, hidden_size)
        self.gate_up = parameter(count, 2 * inner, hidden_size)
        self.down = parameter(count, hidden_size, inner)
        self.score: Callable[[Tensor, Tensor], Tensor] = F.linear
        """The router's product; replaced where products must be batch-invariant (experts' are, on CUDA)."""
        self.act = GatedActivation(hidden_act)
        self.has_kernels = hidden_act in SILU and supports(hidden_size, inner, count, spec.top_k)

    def forward(self, hidden_tm: Tensor) -> Tensor:
        """[t, m] -> [t, m]."""
        logit_te = self.score(hidden_tm, self.router)
        if self.has_kernels and runs_kernels(hidden_tm.device):
            from octavo.kernels.triton.moe import mix  # loads Triton
            from octavo.kernels.triton.moe_experts import Experts

            experts = Experts(self.router, self.gate_up, self.down, self.spec.top_k, self.spec.renormalize)
            return mix(experts, hidden_tm, logit_te)
        return self._by_expert(hidden_tm, logit_te)

    def _by_expert(self, hidden_tm: Tensor, logit_te: Tensor) -> Tensor:
        """A loop over experts, each with its tokens; asks the device how many they are."""
        spec = self.spec
        expert_tj, weight_tj = route(logit_te, spec.top_k, spec.renormalize)
        order_f = expert_tj.flatten().argsort(stable=True)
        sizes = expert_tj.flatten().bincount(minlength=spec.num_experts).tolist()
        out_fm = hidden_tm.new_empty(order_f.shape[0], hidden_tm.shape[1])
        for expert, pair_f in enumerate(torch.split(order_f, sizes)):
            if len(pair_f):
                rows = hidden_tm[pair_f // spec.top_k]
                out_fm[pair_f] = F.linear(self.act(F.linear(rows, self.gate_up[expert])), self.down[expert])
        out_tjm = out_fm.view(-1, spec.top_k, out_fm.shape[1])
        return (out_tjm * weight_tj[:, :, None].to(hidden_tm.dtype)).sum(1)

    def slots(self) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes, names below the block."""
        names, inner = self.names, self.spec.intermediate_size
        found: dict[str, Tensor] = {f"{names.router}.weight": self.router}
        for expert in range(self.spec.num_experts):
            prefix = f"{names.experts}.{expert}"
            gate_up = self.gate_up[expert]
            found[f"{prefix}.{names.gate}.weight"] = gate_up[:inner]
            found[f"{prefix}.{names.up}.weight"] = gate_up[inner:]
            found[f"{prefix}.{names.down}.weight"] = self.down[expert]
        return found

    def merged_slots(self) -> dict[str, Merged]:
        """Where tensors of checkpoints that keep all experts in one go."""
        names = self.names
        prefixes = [f"{names.experts}.{expert}" for expert in range(self.spec.num_experts)]
        halves = tuple(f"{prefix}.{part}.weight" for prefix in prefixes for part in (names.gate, names.up))
        found = {
            f"{names.merged}.gate_up_proj": Merged(self.gate_up, halves),
            f"{names.merged}.down_proj": Merged(self.down, tuple(f"{p}.{names.down}.weight" for p in prefixes)),
        }
        if names.merged_router != names.router:
            found[f"{names.merged_router}.weight"] = Merged(self.router, (f"{names.router}.weight",))
        return found

    def weights(self) -> ExpertWeights:
        """The parameters, by what they are for."""
        return ExpertWeights(self.router, self.gate_up, self.down, self.spec.top_k, self.spec.renormalize)
