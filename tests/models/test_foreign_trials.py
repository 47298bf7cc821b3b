"""What a Transformers module is taken for, found out by trying it: norms and gated MLPs that are ours, and others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.layers.activation import ACTIVATIONS
from octavo.layers.linear import dense
from octavo.layers.parts import Parts
from octavo.models.transformers_experts import ACTS, ExpertsMatch, try_experts
from octavo.models.transformers_trials import UnlikeError, try_gated_mlp, try_norm

DIM, EPS = 24, 1e-5
META = torch.device("meta")


class Norm(nn.Module):
    """A norm by a formula of (x, weight, eps)."""

    def __init__(self, formula: Callable[[Tensor, Tensor, float], Tensor], eps: float = EPS) -> None:
        super().__init__()
        self.formula, self.variance_epsilon = formula, eps
        self.weight = nn.Parameter(torch.empty(DIM, device=META))

    def forward(self, hidden: Tensor) -> Tensor:
        """Of its last dim."""
        return self.formula(hidden, self.weight, self.variance_epsilon)


def rms(x: Tensor, eps: float) -> Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * rms(x, eps).to(x.dtype)


def olmo(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight * rms(x, eps)).to(x.dtype)


def gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (rms(x, eps) * (1.0 + weight.float())).to(x.dtype)


def cohere(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    centred = x.float() - x.float().mean(-1, keepdim=True)
    return (weight.float() * rms(centred, eps)).to(x.dtype)


def outside_root(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight * x.float() / (x.float().square().mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype)


def biased_root(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight * x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) / (DIM - 1) + eps)).to(x.dtype)


def clipped(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (weight * rms(x, eps)).clamp(-3.0, 3.0).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("formula", "kind", "shift", "weight_dtype"),
    [
        (llama, "rms", 0.0, None),
        (olmo, "rms", 0.0, torch.float32),
        (gemma, "rms", 1.0, torch.float32),
        (cohere, "layer", 0.0, None),
    ],
)
def test_norms_that_are_ours(
    formula: Callable[..., Tensor], kind: str, shift: float, weight_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    found = try_norm(Norm(formula).to(dtype).requires_grad_(False), DIM, dtype)
    assert (found.spec.kind, found.spec.shift, found.spec.eps) == (kind, shift, EPS)
    if dtype == torch.bfloat16:
        assert found.dtype == (weight_dtype or dtype)


@pytest.mark.parametrize("formula", [outside_root, biased_root, clipped])
@torch.inference_mode()
def test_norms_that_are_not(formula: Callable[..., Tensor]) -> None:
    with pytest.raises(UnlikeError, match="other numbers"):
        try_norm(Norm(formula).to(torch.bfloat16), DIM, torch.bfloat16)


class TwoInputs(Norm):
    """A norm that a gate may follow."""

    def forward(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Of its last dim."""
        return super().forward(hidden)


def test_norms_of_another_form() -> None:
    with pytest.raises(UnlikeError, match="take hidden, gate"):
        try_norm(TwoInputs(llama), DIM, torch.float32)
    with pytest.raises(UnlikeError, match="no weight and bias of features"):
        try_norm(Norm(llama), DIM + 1, torch.float32)
    with pytest.raises(UnlikeError, match="made of parts"):
        try_norm(nn.Sequential(Norm(llama)), DIM, torch.float32)


class MLP(nn.Module):
    """Three linear layers, whose names tell nothing, and a formula of (gate, up)."""

    def __init__(self, formula: Callable[[Tensor, Tensor], Tensor], *, bias: bool = False, inner: int = 40) -> None:
        super().__init__()
        self.formula = formula
        self.w1, self.w2, self.w3 = (
            nn.Linear(*sizes, bias=bias, device=META) for sizes in ((DIM, inner), (inner, DIM), (DIM, inner))
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., m] -> [..., m]."""
        result: Tensor = self.w2(self.formula(self.w1(hidden), self.w3(hidden)))
        return result


class JoinedMLP(nn.Module):
    """Gate and up in one; cut in halves, or at a size that a copy of another size has not."""

    def __init__(self, *, by_size: bool) -> None:
        super().__init__()
        self.size = 40 if by_size else None
        self.gate_up, self.act, self.down = nn.Linear(DIM, 80, device=META), nn.SiLU(), nn.Linear(40, DIM, device=META)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., m] -> [..., m]."""
        both = self.gate_up(hidden)
        gate, up = both.chunk(2, -1) if self.size is None else both.split(self.size, -1)
        result: Tensor = self.down(self.act(gate) * up)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [40, DIM])
def test_mlps_that_are_ours(dtype: torch.dtype, inner: int) -> None:
    """With equal sizes too, where shapes do not tell down from gate."""
    found = try_gated_mlp(MLP(lambda gate, up: F.silu(gate) * up, inner=inner).to(dtype), DIM, dtype)
    assert (found.gate, found.up, found.down, found.act) == ("w1", "w3", "w2", "silu")
    found = try_gated_mlp(MLP(lambda up, gate: up * F.gelu(gate), bias=True).to(dtype), DIM, dtype)
    assert (found.gate, found.up, found.down, found.act) == ("w3", "w1", "w2", "gelu")
    found = try_gated_mlp(MLP(lambda up, gate: up * F.gelu(gate, approximate="tanh")).to(dtype), DIM, dtype)
    assert found.act == "gelu_new"
    found = try_gated_mlp(JoinedMLP(by_size=False).to(dtype), DIM, dtype)
    assert (found.gate, found.up, found.down, found.act) == ("gate_up", "", "down", "silu")


@pytest.mark.parametrize(
    ("mlp", "words"),
    [
        (MLP(lambda gate, up: F.silu(gate.clamp(max=7.0)) * up), "other numbers"),
        (MLP(lambda gate, up: F.silu(gate) * (up + 1.0)), "other numbers"),
        (MLP(lambda gate, up: torch.sigmoid(gate) * up), "other numbers"),
        (JoinedMLP(by_size=True), "other numbers"),
        (nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)), "no gate, up and down"),
        (nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)), "LayerNorm inside"),
        (nn.Sequential(nn.Linear(8, 16), nn.SiLU()), "1 linear layers"),
    ],
)
def test_mlps_that_are_not(mlp: nn.Module, words: str) -> None:
    with pytest.raises(UnlikeError, match=words):
        try_gated_mlp(mlp.requires_grad_(False), DIM, torch.float32)


class ManyMLPs(nn.Module):
    """Experts of 32 -> 64 -> 32 features, chosen by somebody else; what each gives, by a formula of (gate, up), or
    (not `is_gated`) of up alone."""

    def __init__(self, formula: Callable[..., Tensor], *, is_turned: bool = False, is_gated: bool = True) -> None:
        super().__init__()
        self.formula, self.is_turned, self.is_gated = formula, is_turned, is_gated
        first, down = (nn.Parameter(torch.empty(size, device=META)) for size in ((5, 128, 32), (5, 32, 64)))
        if is_gated:
            self.gate_up_proj = first
        else:
            self.up_proj = nn.Parameter(first[:, :64])
        self.down_proj = down

    def forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Each row's sum, one product after the other."""
        total = torch.zeros_like(rows)
        for row, (chosen, shares) in enumerate(zip(experts, weights, strict=True)):
            for expert, share in zip(chosen.tolist(), shares, strict=True):
                first = F.linear(rows[row], self.gate_up_proj[expert] if self.is_gated else self.up_proj[expert])
                parts = (first[::2], first[1::2]) if self.is_turned else first.chunk(2 if self.is_gated else 1, -1)
                total[row] += F.linear(self.formula(*parts), self.down_proj[expert]) * share
        return total


GIVEN = [torch.Size(size) for size in ((2, 32), (2, 3), (2, 3))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_are_ours(dtype: torch.dtype) -> None:
    module = ManyMLPs(lambda gate, up: F.silu(gate) * up).to(dtype).requires_grad_(False)
    assert try_experts(module, GIVEN, dtype) == ExpertsMatch(32, 64, 5, 3)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("act", ACTS)
def test_activations_of_experts(act: str, is_gated: bool) -> None:
    """Gelu and its approximation are told from each other."""
    function = ACTIVATIONS[act]
    formula = (lambda gate, up: function(gate) * up) if is_gated else function
    module = ManyMLPs(formula, is_gated=is_gated).requires_grad_(False)
    found = try_experts(module, GIVEN, torch.float32)
    assert found == ExpertsMatch(32, 64, 5, 3, act, is_gated)
    slots = found.make("mlp.experts", Parts(dense, torch.bfloat16, META)).slots()
    shapes = {name.removeprefix("mlp.experts."): list(slot.shape) for name, slot in slots.items()}
    first = {"gate_up_proj": [5, 128, 32]} if is_gated else {"up_proj": [5, 64, 32]}
    assert shapes == {**first, "down_proj": [5, 32, 64]}


@pytest.mark.parametrize(
    ("module", "given", "words"),
    [
        (ManyMLPs(lambda gate, up: F.silu(gate) * up, is_turned=True), GIVEN, "other numbers"),
        (ManyMLPs(lambda gate, up: torch.tanh(gate) * up), GIVEN, "other numbers"),
        (ManyMLPs(F.elu, is_gated=False), GIVEN, "other numbers"),
        (ManyMLPs(lambda gate, up: F.silu(gate.clamp(max=7.0)) * up), GIVEN, "other numbers"),
        (ManyMLPs(lambda gate, up: F.silu(gate) * up), GIVEN[:1], "rows, experts and weights"),
        (MLP(lambda gate, up: gate * up), GIVEN, r"no gate_up_proj \(or up_proj\) and down_proj of all experts"),
    ],
)
def test_experts_that_are_not(module: nn.Module, given: list[torch.Size], words: str) -> None:
    with pytest.raises(UnlikeError, match=words):
        try_experts(module.requires_grad_(False), given, torch.float32)
