"""What joins a mixture of experts and the MLP beside it, which a sigmoid weighs.

Shape suffixes: t tokens, m model dim.
"""

from __future__ import annotations

from torch import Tensor


def weighed_sum(hidden_tm: Tensor, gate_1m: Tensor, shared_tm: Tensor, sparse_tm: Tensor) -> Tensor:
    """sparse + sigmoid(hidden . gate) * shared, [t, m]."""
    weight_t1 = (hidden_tm.float() * gate_1m.float()).sum(-1, keepdim=True).sigmoid()
    return (sparse_tm.float() + weight_t1 * shared_tm.float()).to(sparse_tm.dtype)
