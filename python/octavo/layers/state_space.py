"""The Mamba 2 layer (Dao and Gu, 2024) over states that the cache holds, in plain PyTorch.

A block of the cache holds one state: that after the last position of the block that has been computed (`StateSpec`).
Rows of one token are computed together; longer ones in pieces that end where blocks do, so that every border has its
state.

Shape suffixes: t tokens, l tokens of a piece, r rows, m model dim, c convolved channels, k taps, g groups, h heads,
p head dim, n state dim, s numbers of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.attention.base import ForwardContext, StateSpec
from octavo.layers.linear import Linear, dense

MAX_PIECE = 256
"""Tokens whose pairs are looked at together; more are cut."""


@dataclass(frozen=True, slots=True)
class StateSpaceSpec:
    """Sizes of a layer; every head of a group has the group's B and C."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    taps: int
    """Of the causal convolution."""
    norm_eps: float
    has_bias: bool
    has_conv_bias: bool
    step_limits: tuple[float, float]
    """Of the time steps."""

    @property
    def inner(self) -> int:
        """Numbers of a token in all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved: x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def state_size(self) -> int:
        """Numbers of a state: of the heads, and the inputs that the convolution reads again."""
        return self.inner * self.state_dim + self.channels * (self.taps - 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) of a step, of one row and block."""

    start: int
    end: int
    read: int | None
    """Block of the state before; None: that after the piece before (or, of a sequence's first, none)."""
    is_first: bool
    """Nothing is before it."""
    write: int | None
    """Block that gets the state after it; None: the next piece goes on in this block."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where a step's rows have their states; the same for all layers of a group."""

    read_r: Tensor
    """int64, of the rows of one token: the block of the state before, and of that after."""
    write_r: Tensor
    begins_r: Tensor
    """bool: there is none before."""
    pieces: list[Piece]

    @classmethod
    def of(cls, ctx: ForwardContext, layer: int) -> StateRows:
        """Reads the longer rows' sizes on the host."""
        count, size = ctx.num_decode_rows, ctx.block_size
        table_sb = ctx.places(layer).block_table_sb
        slot_r, position_r = ctx.row_slot_r[:count].long(), ctx.position_t[:count]
        read_r = table_sb[slot_r, (position_r - 1).clamp(min=0) // size].long()
        write_r = table_sb[slot_r, position_r // size].long()
        return cls(read_r, write_r, position_r == 0, cls._pieces(ctx, table_sb) if ctx.num_rows > count else [])

    @staticmethod
    def _pieces(ctx: ForwardContext, table_sb: Tensor) -> list[Piece]:
        first, last, size = ctx.num_decode_rows, ctx.num_rows, ctx.block_size
        slots, lengths = ctx.row_slot_r[first:last].tolist(), ctx.kv_len_r[first:last].tolist()
        starts = ctx.query_start_r[first : last + 1].tolist()
        found = []
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            token, end = starts[row], starts[row + 1]
            blocks, begin = table_sb[slot].tolist(), length - (end - token)
            position = begin
            while position < length:
                stop = min(length, (position // size + 1) * size, position + MAX_PIECE)
                is_kept = stop == length or stop % size == 0
                read = blocks[(begin - 1) // size] if position == begin and begin else None
                write = blocks[(stop - 1) // size] if is_kept else None
                found.append(Piece(token, token + stop - position, read, position == 0, write))
                token, position = token + stop - position, stop
        return found


class StateSpaceMixer(nn.Module):
    """[t, m] -> [t, m]."""

    def __init__(self, spec: StateSpaceSpec, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.state = StateSpec(layer, spec.state_size)

        def vector(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        sizes = {"in_proj": spec.inner + spec.channels + spec.num_heads}
        self.project = Linear(spec.hidden_size, sizes, bias=spec.has_bias, dtype=dtype, device=device, choose=dense)
        self.out = Linear(
            spec.inner, {"out_proj": spec.hidden_size}, bias=spec.has_bias, dtype=dtype, device=device, choose=dense
        )
        self.tap_ck, self.norm_weight = vector(spec.channels, spec.taps), vector(spec.inner)
        self.conv_bias_c = vector(spec.channels) if spec.has_conv_bias else None
        self.step_bias_h, self.log_decay_h, self.skip_h = (vector(spec.num_heads) for _ in range(3))

    def slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> what it fills."""
        found = {
            "conv1d.weight": self.tap_ck.unsqueeze(1),
            "norm.weight": self.norm_weight,
            "dt_bias": self.step_bias_h,
            "A_log": self.log_decay_h,
            "D": self.skip_h,
            **self.project.slots(),
            **self.out.slots(),
        }
        if self.conv_bias_c is not None:
            found["conv1d.bias"] = self.conv_bias_c
        return {f"{prefix}.{name}": slot for name, slot in found.items()}

    def forward(self, hidden_tm: Tensor, rows: StateRows, ctx: ForwardContext) -> Tensor:
        """`rows` are of this layer's group."""
        spec = self.spec
        gate_ti, input_tc, step_th = self.project(hidden_tm).split([spec.inner, spec.channels, spec.num_heads], -1)
        states = ctx.kv_cache[self.state.layer]
        step_th = F.softplus(step_th.float() + self.step_bias_h.float()).clamp(*spec.step_limits)
        count = rows.read_r.shape[0]
        parts = [self._advance(input_tc[:count].float(), step_th[:count], rows, states)] if count else []
        head_hpn, tail_ck = self._nothing(states)
        for piece in rows.pieces:
            if piece.is_first:
                head_hpn, tail_ck = self._nothing(states)
            elif piece.read is not None:
                head_hpn, tail_ck = (part[0] for part in self._split(states[piece.read][None]))
            tokens = slice(piece.start, piece.end)
            out_lhp, head_hpn, tail_ck = self._scan(input_tc[tokens].float(), step_th[tokens], head_hpn, tail_ck)
            if piece.write is not None:
                states[piece.write] = torch.cat([head_hpn.flatten(), tail_ck.flatten()])
            parts.append(out_lhp)
        out_ti = torch.cat(parts).flatten(1) if parts else gate_ti.new_zeros((0, spec.inner), dtype=torch.float32)
        if out_ti.shape[0] < gate_ti.shape[0]:
            out_ti = F.pad(out_ti, (0, 0, 0, gate_ti.shape[0] - out_ti.shape[0]))
        result_tm: Tensor = self.out(self._normed(out_ti, gate_ti).to(hidden_tm.dtype))
        return result_tm

    def _normed(self, out_ti: Tensor, gate_ti: Tensor) -> Tensor:
        """Gated, then divided by the root of each group's mean square."""
        gated_ti = out_ti.to(gate_ti.dtype).float() * F.silu(gate_ti.float())
        gated_tgi = torch.unflatten(gated_ti, -1, (self.spec.num_groups, -1))
        scale_tg = torch.rsqrt(gated_tgi.square().mean(-1, keepdim=True) + self.spec.norm_eps)
        return (gated_tgi * scale_tg).flatten(1).to(gate_ti.dtype) * self.norm_weight

    def _nothing(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The state before the first token: ([h, p, n], [c, k - 1])."""
        head, tail = self._split(states.new_zeros(1, states.shape[1]))
        return head[0], tail[0]

    def _split(self, state_rs: Tensor) -> tuple[Tensor, Tensor]:
        """Of the heads [r, h, p, n], and the convolution's last inputs [r, c, k - 1]."""
        spec = self.spec
        head, tail = torch.split(state_rs, [spec.inner * spec.state_dim, spec.channels * (spec.taps - 1)], -1)
        return (
            torch.unflatten(head, -1, (spec.num_heads, spec.head_dim, spec.state_dim)),
            torch.unflatten(tail, -1, (spec.channels, spec.taps - 1)),
        )

    def _convolved(self, window_tck: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [t, h, p], B and C [t, h, n] of tokens whose last inputs are `window`."""
        spec = self.spec
        conv_tc = (window_tck * self.tap_ck.float()).sum(-1)
        if self.conv_bias_c is not None:
            conv_tc = conv_tc + self.conv_bias_c.float()
        shared = spec.num_groups * spec.state_dim
        x_ti, b_tgn, c_tgn = torch.split(F.silu(conv_tc), [spec.inner, shared, shared], -1)
        each = spec.num_heads // spec.num_groups
        parts = (torch.unflatten(part, -1, (spec.num_groups, spec.state_dim)) for part in (b_tgn, c_tgn))
        b_thn, c_thn = (part_tgn.repeat_interleave(each, 1) for part_tgn in parts)
        return torch.unflatten(x_ti, -1, (spec.num_heads, spec.head_dim)), b_thn, c_thn

    def _advance(self, input_rc: Tensor, step_rh: Tensor, rows: StateRows, states: Tensor) -> Tensor:
        """One token of each row [r, h, p]; their states are replaced."""
        state_rs = states[rows.read_r].masked_fill(rows.begins_r[:, None], 0.0)
        head_rhpn, tail_rck = self._split(state_rs)
        window_rck = torch.cat([tail_rck, input_rc[:, :, None]], -1)
        x_rhp, b_rhn, c_rhn = self._convolved(window_rck)
        decay_rh = torch.exp(-step_rh * self.log_decay_h.float().exp())
        gain_rhp = step_rh[..., None] * x_rhp
        head_rhpn = head_rhpn * decay_rh[..., None, None] + gain_rhp[..., None] * b_rhn[:, :, None]
        states[rows.write_r] = torch.cat([head_rhpn.flatten(1), window_rck[..., 1:].flatten(1)], -1)
        return (head_rhpn * c_rhn[:, :, None]).sum(-1) + self.skip_h.float()[:, None] * x_rhp

    def _scan(
        self, input_lc: Tensor, step_lh: Tensor, head_hpn: Tensor, tail_ck: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of one piece [l, h, p], and the state after them: the quadratic form, section 6."""
        padded_lc = torch.cat([tail_ck.t(), input_lc])
        x_lhp, b_lhn, c_lhn = self._convolved(padded_lc.unfold(0, self.spec.taps, 1))
        sum_hl = (-step_lh * self.log_decay_h.float().exp()).cumsum(0).t()
        weight_hls = torch.einsum("lhn,shn->hls", c_lhn, b_lhn)
        weight_hls = weight_hls * torch.exp(
            (sum_hl[:, :, None] - sum_hl[:, None]).masked_fill_(
                torch.ones_like(weight_hls[0], dtype=torch.bool).triu_(1), -torch.inf
            )
        )
        gain_lhp = step_lh[..., None] * x_lhp
        out_lhp = torch.einsum("hls,shp->lhp", weight_hls, gain_lhp)
        out_lhp = out_lhp + torch.einsum("lhn,hpn,hl->lhp", c_lhn, head_hpn, sum_hl.exp())
        out_lhp = out_lhp + self.skip_h.float()[:, None] * x_lhp
        left_hl = torch.exp(sum_hl[:, -1:] - sum_hl)
        head_hpn = head_hpn * sum_hl[:, -1].exp()[:, None, None]
        head_hpn = head_hpn + torch.einsum("hl,lhp,lhn->hpn", left_hl, gain_lhp, b_lhn)
        return out_lhp, head_hpn, padded_lc[len(padded_lc) - self.spec.taps + 1 :].t()
