"""One token a row from its logits: greedy, or drawn from what temperature, top-k, top-p and min-p leave.

Probabilities are integers, whose sums are exact in any order, so what is kept and drawn does not depend on how the work
is split. A draw is two exponential races, between groups of tokens, then within the winner: of weights w and
exponential numbers E the largest w / E wins with probability w / sum(w) (Maddison et al. 2014, "A* sampling").

Shape suffixes: s slots, r rows, v vocabulary, g groups, m members of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.reference.uniform import uniform

GROUP = 256
"""Tokens of a group."""
LARGEST = 1e30
"""What +inf counts as."""


class SlotParameters(NamedTuple):
    """How each slot samples."""

    divisor_s: Tensor
    """float32: the temperature; 1 for greedy slots."""
    random_s: Tensor
    """bool: whether tokens are drawn."""
    k_s: Tensor
    """int64: top-k; the vocabulary's size or more for no limit."""
    p_s: Tensor
    """float64: top-p, of what top-k left; 1 or more for no limit."""
    min_p_log_s: Tensor
    """float32: log(min-p); -inf for no limit."""
    seed_s: Tensor
    """int64"""
    index_s: Tensor
    """int64: which of a request's sequences."""


def integer_weights(x_rv: Tensor, top_r1: Tensor) -> Tensor:
    """floor(exp(x - top) * 2^40) as int64; 0 for -inf."""
    return ((x_rv - top_r1.clamp(min=torch.finfo(torch.float32).min)).exp() * float(1 << 40)).long()


def thresholds(x_rv: Tensor, k_r: Tensor, p_r: Tensor) -> Tensor:
    """float32 [r, 1]: the least value kept by top-k, then top-p; ties with the last one kept are kept. The most
    probable token always is."""
    place_v = torch.arange(x_rv.shape[1], device=x_rv.device)
    sorted_rv = x_rv.sort(1, descending=True).values
    weight_rv = integer_weights(sorted_rv, sorted_rv[:, :1]).masked_fill(place_v >= k_r.unsqueeze(1), 0)
    sum_rv = weight_rv.cumsum(1)
    mass_r1 = p_r.unsqueeze(1) * sum_rv[:, -1:]
    within_rv = (sum_rv - weight_rv < mass_r1) | (p_r.unsqueeze(1) >= 1.0)
    kept_rv = within_rv & (place_v < k_r.unsqueeze(1))
    return sorted_rv.gather(1, (kept_rv.sum(1, keepdim=True) - 1).clamp(min=0))


def race(weight_rc: Tensor, uniform_rc: Tensor) -> Tensor:
    """int64 [r]: the winning column, the first one on ties."""
    return (weight_rc / -torch.log1p(-uniform_rc.clamp(min=2.0**-54))).argmax(1)


def sample(logits_rv: Tensor, slot_r: Tensor, position_r: Tensor, slots: SlotParameters) -> Tensor:
    """int64 [r]. Logits are float32; NaN counts as -inf. A row of -inf gives token 0."""
    num_rows, vocab_size = logits_rv.shape
    slot_r, position_r = slot_r.long(), position_r.long()
    x_rv = logits_rv.nan_to_num(nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf)
    x_rv = x_rv / slots.divisor_s[slot_r].unsqueeze(1)
    top_r1, greedy_r1 = x_rv.max(1, keepdim=True).values, x_rv.argmax(1, keepdim=True)
    least_r1 = thresholds(x_rv, slots.k_s[slot_r], slots.p_s[slot_r])
    least_r1 = least_r1.maximum(top_r1 + slots.min_p_log_s[slot_r].unsqueeze(1))
    weight_rv = integer_weights(x_rv, top_r1).masked_fill(x_rv < least_r1, 0)

    num_groups = -(-vocab_size // GROUP)
    padded_rv = torch.nn.functional.pad(weight_rv, (0, num_groups * GROUP - vocab_size))
    member_rgm = padded_rv.view(num_rows, num_groups, GROUP)
    uniform_ru = uniform(slots.seed_s, slots.index_s, slot_r, position_r, num_groups + GROUP)
    group_r = race(member_rgm.sum(2), uniform_ru[:, :num_groups])
    row_r = torch.arange(num_rows, device=logits_rv.device)
    drawn_r = group_r * GROUP + race(member_rgm[row_r, group_r], uniform_ru[:, num_groups:])
    return torch.where(slots.random_s[slot_r], drawn_r, greedy_r1.squeeze(1))
