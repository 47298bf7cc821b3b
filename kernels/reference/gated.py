"""The activation of a gated MLP, from one product that holds gate and up.

Shape suffixes: t tokens, i features.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def gated_silu(gate_up_t2i: Tensor) -> Tensor:
    """silu(gate) * up, gate first: [t, 2 * i] -> [t, i]; silu(gate) is rounded to the dtype."""
    gate_ti, up_ti = gate_up_t2i.chunk(2, dim=-1)
    return F.silu(gate_ti) * up_ti


def gated_gelu(gate_up_t2i: Tensor) -> Tensor:
    """The same with gelu, approximated by tanh."""
    gate_ti, up_ti = gate_up_t2i.chunk(2, dim=-1)
    return F.gelu(gate_ti, approximate="tanh") * up_ti
