"""The token embedding and the output head: one table [vocabulary, model dim], read by row or multiplied with.

A model with tied heads holds one `Embedding` and uses both of its sides.

Shape suffixes: t tokens, s sampled rows, v vocabulary, m model dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def embed(token_id_t: Tensor, weight_vm: Tensor) -> Tensor:
    """Rows of the table [t, m]; ids are int32 or int64."""
    return F.embedding(token_id_t, weight_vm)


def project(hidden_sm: Tensor, weight_vm: Tensor) -> Tensor:
    """Logits fp32 [s, v]: on CUDA the product's own sums, elsewhere rounded to the weights' dtype before."""
    if hidden_sm.is_cuda and weight_vm.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden_sm, weight_vm.t(), out_dtype=torch.float32)
    return F.linear(hidden_sm, weight_vm).float()


class Embedding(nn.Module):
    """A table of token vectors; `forward` looks ids up, `logits` scores hidden states against every row."""

    def __init__(self, vocab_size: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.project: Callable[[Tensor, Tensor], Tensor] = project
        """What scores hidden states; replaced where products must be batch-invariant."""
        self.weight = nn.Parameter(torch.empty((vocab_size, dim), dtype=dtype, device=device), requires_grad=False)

    def forward(self, token_id_t: Tensor) -> Tensor:
        """[t] -> [t, m]."""
        return embed(token_id_t, self.weight)

    def logits(self, hidden_sm: Tensor) -> Tensor:
        """[s, m] -> fp32 [s, v]."""
        return self.project(hidden_sm, self.weight)
