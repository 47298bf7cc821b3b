"""One token a row from its logits: greedy, or by inverse distribution function from one uniform number.

Probabilities become integers first. Integer sums are exact in any order, so a row's token depends on its logits and its
uniform number alone: not on the batch, the device's kernel or how it splits a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_BITS = 40
"""The most probable token weighs 2^40; vocabularies up to 2^22 tokens can't overflow int64. A token less probable than
the best by more than 2^-40 is never drawn."""
LOWEST = torch.finfo(torch.float32).min


def integer_weights(logits_sv: Tensor, max_s1: Tensor) -> Tensor:
    """floor(exp(logit - max) * 2^40) as int64 [s, v]; 0 for -inf (all of a row of -inf is 0)."""
    return (logits_sv - max_s1.clamp(min=LOWEST)).exp_().mul_(float(1 << WEIGHT_BITS)).long()


def greedy(logits_sv: Tensor) -> Tensor:
    """int64 [s]: the largest logit's token, the lowest id on ties."""
    return logits_sv.argmax(1)


def draw(logits_sv: Tensor, uniform_s: Tensor) -> Tensor:
    """int64 [s]: token i with probability softmax(logits)[i], by the row's uniform number (float64, in [0, 1)).

    The first token whose cumulative weight exceeds uniform * total, in the order of ids; 0 for a row of -inf.
    """
    sum_sv = integer_weights(logits_sv, logits_sv.amax(1, keepdim=True)).cumsum_(1)
    total_s1 = sum_sv[:, -1:]
    target_s1 = (uniform_s.unsqueeze(1) * total_s1).long().minimum(total_s1 - 1)
    token_s1 = torch.searchsorted(sum_sv, target_s1, right=True)
    return token_s1.squeeze(1).clamp_(max=logits_sv.shape[1] - 1)
