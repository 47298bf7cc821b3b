"""SparseMixer's choice of experts (Liu, Gao and Chen, 2024, as Phi 3.5 MoE uses it): one after the other, each weighed
by a softmax over those that come close to it. Not here: the mixture (moe.py).

Shape suffixes: t tokens, e experts, j choices of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_mixer(logit_te: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    """(int32 [t, j], fp32 [t, j]): the best experts and their weights. Beside the best that is left count those whose
    logits are less than 2 * jitter of the larger magnitude below it. Nothing is read on the host."""
    logit_te = logit_te.float()
    left_te, experts, weights = logit_te, [], []
    for _ in range(top_k):
        best_t1, index_t1 = left_te.max(-1, keepdim=True)
        is_far_te = (best_t1 - logit_te) / logit_te.abs().maximum(best_t1) > 2 * jitter
        share_te = left_te.masked_fill(is_far_te, -torch.inf).softmax(-1)
        experts.append(index_t1)
        weights.append(share_te.gather(-1, index_t1))
        left_te = left_te.scatter(-1, index_t1, -torch.inf)
    return torch.cat(experts, -1).int(), torch.cat(weights, -1)
