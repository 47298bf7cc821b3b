"""RMS norms of groups of features, with a gate: silu(gate) before the norm (Mamba 2) or after it (gated delta nets).

Shape suffixes: t tokens, i features, g groups, d features of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gated_norm(x_ti: Tensor, gate_ti: Tensor, gain: Tensor, eps: float, *, group: int, gates_first: bool) -> Tensor:
    """[t, i] in x's dtype. Every `group` features are divided by the root of their mean square; `gain` is of all
    features, or of those of a group."""
    wide_ti, gate_wide_ti = x_ti.float(), F.silu(gate_ti.float())
    if gates_first:
        wide_ti = wide_ti * gate_wide_ti
    wide_tgd = wide_ti.unflatten(-1, (-1, group))
    normed_tgd = wide_tgd * torch.rsqrt(wide_tgd.square().mean(-1, keepdim=True) + eps)
    normed_tgd = normed_tgd.to(x_ti.dtype) * gain.view(-1, group)
    return normed_tgd.flatten(1) if gates_first else (normed_tgd.flatten(1) * gate_wide_ti).to(x_ti.dtype)
