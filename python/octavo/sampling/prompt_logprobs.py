"""Logprobs of prompt tokens: like those of sampled ones, but the tokens are given, and there are many at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.sampling.logprobs import TokenLogprobs, gather_logprobs, raw_logprobs
from octavo.sampling.sampler import clean


def prompt_logprobs(
    hidden_tm: Tensor, target_t: Tensor, num_top: int, logits: Callable[[Tensor], Tensor], chunk: int
) -> TokenLogprobs:
    """Logprobs of the targets (int64 [t]) and of the top tokens at their places; logits of at most `chunk` tokens
    exist at a time."""
    parts = [
        gather_logprobs(raw_logprobs(clean(logits(hidden_cm))), target_c, num_top)
        for hidden_cm, target_c in zip(torch.split(hidden_tm, chunk), torch.split(target_t, chunk), strict=True)
    ]
    return TokenLogprobs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
