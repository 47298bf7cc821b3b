"""The state-space layer of Mamba 2 (Dao and Gu, 2024): every head has a state [p, n], which decays and takes up the
outer product of the token's x and B; the output is the state's product with C.

Shape suffixes: t tokens, l tokens of a piece (s: those before), r rows, c channels, g groups, h heads, p head dim,
n state dim, b blocks, z numbers of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.reference.state_rows import StateRows

MAX_PIECE = 256
"""Tokens whose pairs are looked at together; more are cut."""


@dataclass(frozen=True, slots=True)
class StateSpaceShape:
    """Sizes; every head of a group has the group's B and C."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int

    @property
    def inner(self) -> int:
        """Numbers of x."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Numbers of x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def state_size(self) -> int:
        """Numbers of a layer's state."""
        return self.inner * self.state_dim


@dataclass(frozen=True, slots=True)
class StateSpaceWeights:
    """A layer's parameters, one a head, and the bounds of its time steps."""

    step_bias_h: Tensor
    log_decay_h: Tensor
    skip_h: Tensor
    step_limits: tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Inputs:
    x_lhp: Tensor
    b_lhn: Tensor
    c_lhn: Tensor
    step_lh: Tensor
    decay_lh: Tensor
    """Logarithms."""


def state_space(
    xbc_tc: Tensor,
    step_th: Tensor,
    weights: StateSpaceWeights,
    shape: StateSpaceShape,
    state_bz: Tensor,
    rows: StateRows,
) -> Tensor:
    """Output [t, h * p] in x's dtype; tokens of no row get zeros.

    `xbc`: x, B and C of each token, convolved; `step`: time steps before bias and softplus. A state [h, p, n] is at a
    block's beginning; states are read and replaced.
    """
    heads_bz = state_bz[:, : shape.state_size]
    sizes = shape.num_heads, shape.head_dim, shape.state_dim
    out_thp = xbc_tc.new_zeros(xbc_tc.shape[0], *sizes[:2])
    count = rows.count_decodes()
    if count:
        read_r, write_r, begins_r = rows.decodes()
        state_rhpn = heads_bz[read_r].masked_fill(begins_r[:, None], 0.0).view(count, *sizes)
        parts = _inputs(xbc_tc[:count], step_th[:count], weights, shape)
        gain_rhp = parts.step_lh[..., None] * parts.x_lhp
        state_rhpn = state_rhpn * parts.decay_lh.exp()[..., None, None] + gain_rhp[..., None] * parts.b_lhn[:, :, None]
        heads_bz[write_r] = state_rhpn.flatten(1)
        result = (state_rhpn * parts.c_lhn[:, :, None]).sum(-1) + weights.skip_h.float()[:, None] * parts.x_lhp
        out_thp[:count] = result.to(out_thp.dtype)
    for row in rows.prompts():
        state_hpn = heads_bz.new_zeros(sizes) if row.read is None else heads_bz[row.read].view(sizes)
        for start, end, block in row.pieces:
            for first in range(start, end, MAX_PIECE):
                tokens = slice(first, min(end, first + MAX_PIECE))
                parts = _inputs(xbc_tc[tokens], step_th[tokens], weights, shape)
                result, state_hpn = _scan(parts, state_hpn)
                out_thp[tokens] = (result + weights.skip_h.float()[:, None] * parts.x_lhp).to(out_thp.dtype)
            heads_bz[block] = state_hpn.flatten()
    return out_thp.flatten(1)


def _inputs(xbc_lc: Tensor, step_lh: Tensor, weights: StateSpaceWeights, shape: StateSpaceShape) -> _Inputs:
    """In fp32, B and C of each head."""
    shared, each = shape.num_groups * shape.state_dim, shape.num_heads // shape.num_groups
    x_li, b_lgn, c_lgn = xbc_lc.float().split([shape.inner, shared, shared], -1)
    step_lh = F.softplus(step_lh.float() + weights.step_bias_h.float()).clamp(*weights.step_limits)
    return _Inputs(
        x_li.unflatten(-1, (shape.num_heads, shape.head_dim)),
        b_lgn.unflatten(-1, (shape.num_groups, shape.state_dim)).repeat_interleave(each, 1),
        c_lgn.unflatten(-1, (shape.num_groups, shape.state_dim)).repeat_interleave(each, 1),
        step_lh,
        -step_lh * weights.log_decay_h.float().exp(),
    )


def _scan(parts: _Inputs, state_hpn: Tensor) -> tuple[Tensor, Tensor]:
    """Output [l, h, p] of one piece, and the state after it: the quadratic form, section 6."""
    sum_hl = parts.decay_lh.cumsum(0).t()
    weight_hls = torch.einsum("lhn,shn->hls", parts.c_lhn, parts.b_lhn)
    later_ls = torch.ones_like(weight_hls[0], dtype=torch.bool).triu_(1)
    weight_hls = weight_hls * (sum_hl[:, :, None] - sum_hl[:, None]).masked_fill_(later_ls, -torch.inf).exp()
    gain_lhp = parts.step_lh[..., None] * parts.x_lhp
    out_lhp = torch.einsum("hls,shp->lhp", weight_hls, gain_lhp)
    out_lhp = out_lhp + torch.einsum("lhn,hpn,hl->lhp", parts.c_lhn, state_hpn, sum_hl.exp())
    left_hl = (sum_hl[:, -1:] - sum_hl).exp()
    state_hpn = state_hpn * sum_hl[:, -1].exp()[:, None, None]
    return out_lhp, state_hpn + torch.einsum("hl,lhp,lhn->hpn", left_hl, gain_lhp, parts.b_lhn)
