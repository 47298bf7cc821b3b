"""One token a row from its logits: greedy, or drawn by exponential races (Gumbel 1954; Maddison et al. 2014, "A*
sampling"): of weights w and exponential numbers E the largest w / E wins with probability w / sum(w).

Two races, first between groups of tokens and then within the winner, need few numbers and give the same distribution.
A race hardly minds rounding: logits that differ by 1e-5, as those of one sequence do in batches of other sizes, give
another token once in 1e5 draws. (One uniform number along the distribution function would do so every hundredth time:
errors of its sum pass over many improbable tokens.) Weights are integers, whose sums are exact in any order.

Shape suffixes: s rows, v vocabulary, g groups, m members of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_BITS = 40
"""The most probable token weighs 2^40; vocabularies up to 2^22 tokens can't overflow int64. A token less probable than
the best by more than 2^-40 is never drawn."""
LOWEST = torch.finfo(torch.float32).min
GROUP = 256
"""Tokens of a group."""


def integer_weights(logits_sv: Tensor, max_s1: Tensor) -> Tensor:
    """floor(exp(logit - max) * 2^40) as int64 [s, v]; 0 for -inf (all of a row of -inf is 0)."""
    return (logits_sv - max_s1.clamp(min=LOWEST)).exp_().mul_(float(1 << WEIGHT_BITS)).long()


def greedy(logits_sv: Tensor) -> Tensor:
    """int64 [s]: the largest logit's token, the lowest id on ties."""
    return logits_sv.argmax(1)


def num_uniforms(vocab_size: int) -> int:
    """How many uniform numbers a draw takes: one for each group, one for each member of a group."""
    return -(-vocab_size // GROUP) + GROUP


def draw(logits_sv: Tensor, uniform_su: Tensor) -> Tensor:
    """int64 [s]: token i with probability softmax(logits)[i], by the row's `num_uniforms(v)` numbers (float64, in
    [0, 1)); 0 for a row of -inf."""
    vocab_size = logits_sv.shape[1]
    weight_sv = integer_weights(logits_sv, logits_sv.amax(1, keepdim=True))
    group_s1 = _race(_group_sums(weight_sv), uniform_su[:, :-GROUP])
    token_sm = group_s1 * GROUP + torch.arange(GROUP, device=logits_sv.device)
    weight_sm = weight_sv.gather(1, token_sm.clamp(max=vocab_size - 1)).masked_fill_(token_sm >= vocab_size, 0)
    return token_sm.gather(1, _race(weight_sm, uniform_su[:, -GROUP:])).squeeze(1)


def _group_sums(weight_sv: Tensor) -> Tensor:
    """int64 [s, g]: sums over GROUP tokens with neighbouring ids; the last group may be smaller."""
    num_rows, vocab_size = weight_sv.shape
    num_full = vocab_size // GROUP
    sums = [weight_sv[:, : num_full * GROUP].reshape(num_rows, num_full, GROUP).sum(2)]
    if vocab_size % GROUP:
        sums.append(weight_sv[:, num_full * GROUP :].sum(1, keepdim=True))
    return torch.cat(sums, 1)


def _race(weight: Tensor, uniform: Tensor) -> Tensor:
    """int64 [s, 1]: the winning column. A column without weight never wins against one with."""
    exponential = uniform.clamp(min=2.0**-54).neg_().log1p_().neg_()
    return weight.div(exponential).argmax(1, keepdim=True)
