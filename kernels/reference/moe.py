"""What a mixture of experts computes (kernels/triton/moe_*.py): router, top-k, experts (gated MLPs, or MLPs without
a gate), weighted sum.

Shape suffixes: m rows, h model dim, e experts, j choices, i inner dim, f flat pairs (row * TOP_K + choice).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.reference.activations import ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Rule:
    """How a router's logits become experts and their weights; see `choose`."""

    sigmoid: bool = False
    """Scores are sigmoids of logits, else their softmax."""
    renormalize: bool = False
    """The chosen experts' weights are divided by their sum."""
    scale: float = 1.0
    """Weights are multiplied by it in the end."""
    groups: int = 1
    top_groups: int = 1
    """Of `groups` runs of experts, only the best so many are chosen from."""
    best_two: bool = False
    """What ranks a group: the sum of its best two experts, or else its best one."""


def choose(logit_me: Tensor, top_k: int, rule: Rule, bias_e: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(experts int64 [m, j], best first; their weights fp32 [m, j]). `bias_e` is added to scores when experts are
    chosen, but not in their weights."""
    logit_me = logit_me.float()
    score_me = logit_me.sigmoid() if rule.sigmoid else logit_me.softmax(-1)
    ranked_me = score_me if bias_e is None else score_me + bias_e
    if rule.groups > 1:
        ranked_mgs = torch.unflatten(ranked_me, -1, (rule.groups, -1))
        best_mg = ranked_mgs.topk(2 if rule.best_two else 1, dim=-1).values.sum(-1)
        group_mk = best_mg.topk(rule.top_groups, dim=-1).indices
        is_out_mg = torch.ones_like(best_mg, dtype=torch.bool).scatter(1, group_mk, False)
        ranked_me = ranked_mgs.masked_fill(is_out_mg[..., None], -torch.inf).flatten(1)
    expert_mj = ranked_me.topk(top_k, dim=-1).indices
    weight_mj = score_me.gather(1, expert_mj)
    if rule.renormalize:
        weight_mj = weight_mj / (weight_mj.sum(-1, keepdim=True) + 1e-20)
    return expert_mj, weight_mj * rule.scale


def route(logit_me: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """(experts int64 [m, j], best first and of equals the lower number; their softmax weights fp32 [m, j])."""
    probability_me = logit_me.float().softmax(-1)
    order_me = logit_me.float().sort(dim=-1, descending=True, stable=True).indices
    expert_mj = order_me[:, :top_k]
    weight_mj = probability_me.gather(1, expert_mj)
    if renormalize:
        weight_mj = weight_mj / weight_mj.sum(-1, keepdim=True)
    return expert_mj, weight_mj


def sort_pairs(expert_mj: Tensor, num_experts: int, block: int) -> tuple[list[int], list[int]]:
    """(pair of each place or -1, expert of each tile of `block` places), without tiles that hold no pair."""
    pair_s: list[int] = []
    expert_t: list[int] = []
    expert_f = expert_mj.flatten().tolist()
    for expert in range(num_experts):
        pairs = [f for f, e in enumerate(expert_f) if e == expert]
        tiles = -(-len(pairs) // block)
        pair_s += pairs + [-1] * (tiles * block - len(pairs))
        expert_t += [expert] * tiles
    return pair_s, expert_t


def clamped(gate: Tensor, up: Tensor, limit: float, slope: float) -> Tensor:
    """gpt-oss's activation: gate * sigmoid(slope * gate) * (up + 1), both clamped first (the gate from above only)."""
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(slope * gate) * (up.clamp(-limit, limit) + 1)


def experts(
    x_mh: Tensor,
    expert_mj: Tensor,
    weight_mj: Tensor,
    gate_up_e2ih: Tensor,
    down_ehi: Tensor,
    *,
    gate_up_bias_e2i: Tensor | None = None,
    down_bias_eh: Tensor | None = None,
    limit: float = 0.0,
    slope: float = 1.0,
    activation: str = "silu",
    is_gated: bool = True,
    round_inner: Callable[[Tensor], Tensor] = lambda inner_ri: inner_ri,
) -> Tensor:
    """Sum over choices of weight * down(act(gate) * up), fp32 [m, h]; with a `limit`, of `clamped` activations; not
    `is_gated`, of act(up), for which `gate_up` has up alone. `round_inner` is what happens to activations on their way
    into the second product (e4m3 in groups, for one)."""
    out_mh = torch.zeros(x_mh.shape, dtype=torch.float32, device=x_mh.device)
    for expert in range(gate_up_e2ih.shape[0]):
        row, choice = (expert_mj == expert).nonzero(as_tuple=True)
        first, second = (None if b is None else b[expert].float() for b in (gate_up_bias_e2i, down_bias_eh))
        gate_up_rn = F.linear(x_mh[row].float(), gate_up_e2ih[expert].float(), first)
        if is_gated:
            gate_ri, up_ri = gate_up_rn.chunk(2, dim=-1)
            inner_ri = clamped(gate_ri, up_ri, limit, slope) if limit else ACTIVATIONS[activation](gate_ri) * up_ri
        else:
            inner_ri = ACTIVATIONS[activation](gate_up_rn)
        y_rh = F.linear(round_inner(inner_ri), down_ehi[expert].float(), second)
        out_mh.index_add_(0, row, y_rh * weight_mj[row, choice, None].float())
    return out_mh
