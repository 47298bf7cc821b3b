"""What joins a mixture of experts and the MLP beside it: their sum, the MLP weighed by a sigmoid of a product.

Shape suffixes: t tokens, m model dim.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from octavo.kernels.reference.weighed_sum import weighed_sum
from octavo.layers.parts import Parts


class WeighedSum(nn.Module):
    """`gate` [1, m]; a kernel may take the place of `run` (fused/joins.py)."""

    def __init__(self, dim: int, parts: Parts) -> None:
        super().__init__()
        self.gate = parts.parameter(1, dim)
        self.run: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = weighed_sum

    def forward(self, hidden_tm: Tensor, shared_tm: Tensor, sparse_tm: Tensor) -> Tensor:
        """What both read, and what they give: [t, m]."""
        return self.run(hidden_tm, self.gate, shared_tm, sparse_tm)
