"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2024, "Gated Delta Networks"): every head has a state [k, v], a
linear map from keys to values; it decays, and is corrected at the token's key towards the token's value.

Shape suffixes: t tokens, l tokens of a piece (s: those before), r rows, c channels, h value heads, k key dim, v value
dim, b blocks, z numbers of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.reference.state_rows import StateRows

MAX_PIECE = 64
"""Tokens whose corrections are solved for together; more are cut."""
EPS = 1e-6
"""Beside the squared lengths of queries and keys."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes; a key head serves num_value_heads / num_key_heads value heads, one after the other."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Numbers of q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        """Numbers of v."""
        return self.num_value_heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers of a layer's state."""
        return self.inner * self.key_dim


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """A layer's parameters, one a value head."""

    step_bias_h: Tensor
    log_decay_h: Tensor


@dataclass(frozen=True, slots=True)
class _Inputs:
    q_lhk: Tensor
    k_lhk: Tensor
    v_lhv: Tensor
    strength_lh: Tensor
    decay_lh: Tensor
    """Logarithms."""


def gated_delta(
    qkv_tc: Tensor,
    strength_th: Tensor,
    step_th: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    state_bz: Tensor,
    rows: StateRows,
) -> Tensor:
    """Output [t, h * v] in v's dtype; tokens of no row get zeros.

    `qkv`: q, k and v of each token, convolved; `strength`: of corrections, before the sigmoid; `step`: time steps
    before bias and softplus. A state [h, k, v] is at a block's beginning; states are read and replaced.
    """
    heads_bz = state_bz[:, : shape.state_size]
    sizes = shape.num_value_heads, shape.key_dim, shape.value_dim
    out_thv = qkv_tc.new_zeros(qkv_tc.shape[0], sizes[0], sizes[2])
    count = rows.count_decodes()
    if count:
        read_r, write_r, begins_r = rows.decodes()
        state_rhkv = heads_bz[read_r].masked_fill(begins_r[:, None], 0.0).view(count, *sizes)
        parts = _inputs(qkv_tc[:count], strength_th[:count], step_th[:count], weights, shape)
        state_rhkv = state_rhkv * parts.decay_lh.exp()[..., None, None]
        known_rhv = (state_rhkv * parts.k_lhk[..., None]).sum(-2)
        change_rhv = (parts.v_lhv - known_rhv) * parts.strength_lh[..., None]
        state_rhkv = state_rhkv + parts.k_lhk[..., None] * change_rhv[..., None, :]
        heads_bz[write_r] = state_rhkv.flatten(1)
        out_thv[:count] = (state_rhkv * parts.q_lhk[..., None]).sum(-2).to(out_thv.dtype)
    for row in rows.prompts():
        state_hkv = heads_bz.new_zeros(sizes) if row.read is None else heads_bz[row.read].view(sizes)
        for start, end, block in row.pieces:
            for first in range(start, end, MAX_PIECE):
                tokens = slice(first, min(end, first + MAX_PIECE))
                parts = _inputs(qkv_tc[tokens], strength_th[tokens], step_th[tokens], weights, shape)
                result, state_hkv = _scan(parts, state_hkv)
                out_thv[tokens] = result.to(out_thv.dtype)
            heads_bz[block] = state_hkv.flatten()
    return out_thv.flatten(1)


def _inputs(qkv_lc: Tensor, strength_lh: Tensor, step_lh: Tensor, weights: DeltaWeights, shape: DeltaShape) -> _Inputs:
    """In fp32; queries and keys of unit length, those of each value head, queries scaled."""
    keys, each = shape.num_key_heads * shape.key_dim, shape.num_value_heads // shape.num_key_heads
    q_li, k_li, v_li = qkv_lc.float().split([keys, keys, shape.inner], -1)
    q_lhk, k_lhk = (x.unflatten(-1, (shape.num_key_heads, shape.key_dim)) for x in (q_li, k_li))
    q_lhk, k_lhk = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q_lhk, k_lhk))
    step_lh = F.softplus(step_lh.float() + weights.step_bias_h.float())
    return _Inputs(
        q_lhk.repeat_interleave(each, 1) * shape.key_dim**-0.5,
        k_lhk.repeat_interleave(each, 1),
        v_li.unflatten(-1, (shape.num_value_heads, shape.value_dim)),
        strength_lh.float().sigmoid(),
        -step_lh * weights.log_decay_h.float().exp(),
    )


def _scan(parts: _Inputs, state_hkv: Tensor) -> tuple[Tensor, Tensor]:
    """Output [l, h, v] of one piece, and the state after it: the WY form, section 3.

    What every token corrects depends on the corrections before it: a triangular system, whose solution for the values
    (with the state before the piece taken off) is what all tokens add to the state.
    """
    q_hlk, k_hlk, v_hlv = (x.transpose(0, 1) for x in (parts.q_lhk, parts.k_lhk, parts.v_lhv))
    strength_hl1, sum_hl = parts.strength_lh.t()[..., None], parts.decay_lh.cumsum(0).t()
    later_ls = torch.ones(sum_hl.shape[1], sum_hl.shape[1], dtype=torch.bool, device=sum_hl.device).triu_(1)
    decay_hls = (sum_hl[:, :, None] - sum_hl[:, None]).masked_fill_(later_ls, -torch.inf).exp()
    grown_hl1 = sum_hl.exp()[..., None]
    system_hls = strength_hl1 * (k_hlk @ k_hlk.transpose(1, 2)) * decay_hls
    wanted_hlv = strength_hl1 * (v_hlv - grown_hl1 * (k_hlk @ state_hkv))
    change_hlv = torch.linalg.solve_triangular(system_hls, wanted_hlv, upper=False, unitriangular=True)
    out_hlv = grown_hl1 * (q_hlk @ state_hkv) + ((q_hlk @ k_hlk.transpose(1, 2)) * decay_hls) @ change_hlv
    left_hl1 = (sum_hl[:, -1:] - sum_hl).exp()[..., None]
    state_hkv = state_hkv * sum_hl[:, -1].exp()[:, None, None] + (k_hlk * left_hl1).transpose(1, 2) @ change_hlv
    return out_hlv.transpose(0, 1), state_hkv
