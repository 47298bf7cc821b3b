"""Which experts the finished logits of rows choose, by any router's rule, in one launch: scores by sigmoid or softmax,
a bias of the choice, best groups, top-k, weights divided by their sum and scaled. What `choose` of
kernels/reference/moe.py computes; of equals the lower number is chosen, what is not a number is the least.

Routers that only take the top k of a softmax have kernels of their own (moe_route.py), which decode steps fuse with the
router's product.

Shape suffixes: m rows, e experts, j choices; f experts with gaps that make groups powers of two, g groups, s places of
a group.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.moe import Rule
from octavo.kernels.triton.handles import only_compiling
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.target import has_dependent_launches

FEW_ROWS: Final = 256
"""Up to so many, a program has one row."""
BLOCK_ROWS: Final = 8
"""Else so many."""


@triton.jit
def keyed(x, exists):
    """int32 in the order of numbers; what does not exist comes last."""
    x = tl.where(x == x, x, float("-inf")) + 0.0  # -0 is 0
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(exists, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483647)


@triton.jit(do_not_specialize=["num_rows"])
def choose_kernel(
    logit_me, bias_e, expert_mj, weight_mj, num_rows, scale,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_P2: tl.constexpr, PLACES: tl.constexpr,
    TOP_K: tl.constexpr, TOP_K_P2: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, BIASED: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    row_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tl.arange(0, GROUPS_P2 * PLACES)
    number_f = (f // PLACES) * SIZE + f % PLACES
    exists_f = (f % PLACES < SIZE) & (f // PLACES < GROUPS)
    if BIASED:
        bias_f = tl.load(bias_e + number_f, mask=exists_f, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_real_m = row_m < num_rows
    place = row_m.to(tl.int64)[:, None] * EXPERTS + number_f[None, :]
    logit_mf = tl.load(logit_me + place, mask=is_real_m[:, None] & exists_f[None, :], other=float("-inf"))
    logit_mf = logit_mf.to(tl.float32)
    if SIGMOID:
        score_mf = 1.0 / (1.0 + tl.exp(-logit_mf))
    else:
        power_mf = tl.exp(logit_mf - tl.max(logit_mf, 1)[:, None])
        score_mf = power_mf / tl.sum(power_mf, 1)[:, None]
    rank_mf = score_mf
    if BIASED:
        rank_mf = score_mf + bias_f[None, :]
    if GROUPS > 1:
        SHAPE: tl.constexpr = [BLOCK_M, GROUPS_P2, PLACES]
        g, s = tl.arange(0, GROUPS_P2)[None, :], tl.arange(0, PLACES)[None, None, :]
        within_mgs = tl.reshape(tl.where(exists_f[None, :], rank_mf, float("-inf")), SHAPE)
        best_mg = tl.max(within_mgs, 2)
        if BEST_TWO:
            is_best_mgs = s == tl.argmax(within_mgs, 2)[:, :, None]
            best_mg += tl.max(tl.where(is_best_mgs, float("-inf"), within_mgs), 2)
        left_mg = keyed(best_mg, g < GROUPS)
        is_in_mg = tl.zeros([BLOCK_M, GROUPS_P2], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            is_best_mg = g == tl.argmax(left_mg, 1)[:, None]
            is_in_mg = tl.where(is_best_mg, 1, is_in_mg)
            left_mg = tl.where(is_best_mg, -2147483648, left_mg)
        is_in_mf = tl.reshape(tl.broadcast_to(is_in_mg[:, :, None], SHAPE), [BLOCK_M, GROUPS_P2 * PLACES])
        rank_mf = tl.where(is_in_mf != 0, rank_mf, float("-inf"))
    left_mf = keyed(rank_mf, exists_f[None, :])
    j = tl.arange(0, TOP_K_P2)[None, :]
    chosen_mj = tl.zeros([BLOCK_M, TOP_K_P2], tl.int32)
    share_mj = tl.zeros([BLOCK_M, TOP_K_P2], tl.float32)
    for choice in tl.static_range(TOP_K):
        is_best_mf = f[None, :] == tl.argmax(left_mf, 1)[:, None]
        chosen_mj = tl.where(j == choice, tl.sum(tl.where(is_best_mf, number_f[None, :], 0), 1)[:, None], chosen_mj)
        share_mj = tl.where(j == choice, tl.sum(tl.where(is_best_mf, score_mf, 0.0), 1)[:, None], share_mj)
        left_mf = tl.where(is_best_mf, -2147483648, left_mf)
    if RENORMALIZE:
        share_mj = share_mj / (tl.sum(share_mj, 1)[:, None] + 1e-20)
    target = row_m.to(tl.int64)[:, None] * TOP_K + j
    is_choice = is_real_m[:, None] & (j < TOP_K)
    tl.store(expert_mj + target, chosen_mj, mask=is_choice)
    tl.store(weight_mj + target, share_mj * scale, mask=is_choice)


def choose(logit_me: Tensor, top_k: int, rule: Rule, bias_e: Tensor | None) -> tuple[Tensor, Tensor]:
    """(experts int32 [m, j], their weights fp32 [m, j]), as the reference's; logits are contiguous."""
    num_rows = logit_me.shape[0]
    expert_mj = torch.empty(num_rows, top_k, dtype=torch.int32, device=logit_me.device)
    weight_mj = torch.empty(num_rows, top_k, dtype=torch.float32, device=logit_me.device)
    pdl = has_dependent_launches(logit_me.device)
    counts = (1, FEW_ROWS + 1) if only_compiling() else (num_rows,)
    for count in counts if num_rows else ():
        choose_launch(logit_me, count, top_k, rule, bias_e, expert_mj, weight_mj).run(pdl=pdl)
    return expert_mj, weight_mj


def choose_launch(
    logit_me: Tensor,
    num_rows: int,
    top_k: int,
    rule: Rule,
    bias_e: Tensor | None,
    expert_mj: Tensor,
    weight_mj: Tensor,
) -> Launch:
    """`choose` of the first rows, into given memory."""
    assert logit_me.is_contiguous()
    num_experts = logit_me.shape[1]
    args = {
        "logit_me": logit_me,
        "bias_e": logit_me if bias_e is None else bias_e,
        "expert_mj": expert_mj,
        "weight_mj": weight_mj,
        "num_rows": num_rows,
        "scale": rule.scale,
    }
    block = 1 if num_rows <= FEW_ROWS else BLOCK_ROWS
    constants = {
        "EXPERTS": num_experts,
        "GROUPS": rule.groups,
        "GROUPS_P2": triton.next_power_of_2(rule.groups),
        "PLACES": triton.next_power_of_2(num_experts // rule.groups),
        "TOP_K": top_k,
        "TOP_K_P2": triton.next_power_of_2(top_k),
        "TOP_GROUPS": rule.top_groups,
        "BEST_TWO": rule.best_two,
        "SIGMOID": rule.sigmoid,
        "RENORMALIZE": rule.renormalize,
        "BIASED": bias_e is not None,
        "BLOCK_M": block,
    }
    return Launch(choose_kernel, (triton.cdiv(num_rows, block),), args, constants, 1 if block == 1 else 4)
