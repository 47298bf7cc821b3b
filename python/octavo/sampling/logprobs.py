"""Log probabilities of the model's own distribution (before any feature), their top tokens and ranks.

Order is by value, then by id; it is exact, because both go into one integer key.

Shape suffixes: s rows, v vocabulary, k top tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """The given token first, then the top k in descending order."""

    id_sk: Tensor
    """int32 [s, 1 + k]"""
    value_sk: Tensor
    """float32 [s, 1 + k]"""
    rank_s: Tensor
    """int32 [s]: 1 + the number of tokens that are more probable."""


def raw_logprobs(logits_sv: Tensor) -> Tensor:
    """float32 [s, v]: log softmax; -inf throughout a row of -inf."""
    best_s1 = logits_sv.amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    shifted_sv = logits_sv - best_s1
    total_s1 = shifted_sv.exp().sum(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    return shifted_sv.sub_(total_s1.log_())


def top_tokens(value_sv: Tensor, k: int) -> Tensor:
    """int64 [s, k]: ids of the k largest values, in descending order, the lower id first among equals.

    A float's bits, read as an integer, are in the float's order (negative ones reversed); the id fills the low half.
    """
    vocab_size = value_sv.shape[1]
    bits_sv = (value_sv + 0.0).view(torch.int32)
    order_sv = torch.where(bits_sv < 0, bits_sv ^ 0x7FFFFFFF, bits_sv).long()
    reverse_v = torch.arange(vocab_size - 1, -1, -1, device=value_sv.device)
    key_sv = order_sv.mul_(1 << 32).add_(reverse_v)
    return vocab_size - 1 - (key_sv.topk(k, dim=1).values & 0xFFFFFFFF)


def gather_logprobs(logprob_sv: Tensor, token_s: Tensor, num_top: int) -> TokenLogprobs:
    """Logprobs of the given tokens (int64 [s]) and of the `num_top` most probable ones."""
    token_s1 = token_s.unsqueeze(1)
    own_s1 = logprob_sv.gather(1, token_s1)
    rank_s = 1 + (logprob_sv > own_s1).sum(1, dtype=torch.int32)
    top_sk = top_tokens(logprob_sv, min(num_top, logprob_sv.shape[1])) if num_top else token_s1[:, :0]
    id_sk = torch.cat((token_s1, top_sk), dim=1)
    return TokenLogprobs(id_sk.int(), logprob_sv.gather(1, id_sk), rank_s)
