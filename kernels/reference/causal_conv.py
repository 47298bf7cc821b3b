"""The causal convolution of recurrent layers: every channel by itself, over its last few inputs, then silu.

Shape suffixes: t tokens, c channels, k taps, b blocks, n numbers of a state, r rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.reference.state_rows import StateRows


def tail_size(channels: int, taps: int) -> int:
    """Numbers of a state: the inputs that are read again."""
    return channels * (taps - 1)


def causal_conv(
    input_tc: Tensor, tap_ck: Tensor, bias_c: Tensor | None, state_bn: Tensor, rows: StateRows, *, offset: int
) -> Tensor:
    """silu(sum of taps * inputs + bias), [t, c] in the input's dtype; tokens of no row get zeros.

    A state has the last k - 1 inputs, oldest first, [k - 1, c], from number `offset` on; they are read and replaced.
    """
    channels, taps = tap_ck.shape
    tail_bn = state_bn[:, offset : offset + tail_size(channels, taps)]
    tap_kc, bias = tap_ck.t().float(), 0.0 if bias_c is None else bias_c.float()
    out_tc = torch.zeros_like(input_tc)
    count = rows.count_decodes()
    if count:
        read_r, write_r, begins_r = rows.decodes()
        tail_rn = tail_bn[read_r].masked_fill(begins_r[:, None], 0.0)
        window_rkc = torch.cat((tail_rn.view(count, taps - 1, channels), input_tc[:count, None].float()), 1)
        out_tc[:count] = F.silu((window_rkc * tap_kc).sum(1) + bias).to(out_tc.dtype)
        tail_bn[write_r] = window_rkc[:, 1:].flatten(1)
    for row in rows.prompts():
        tail_kc = input_tc.new_zeros(taps - 1, channels, dtype=torch.float32)
        if row.read is not None:
            tail_kc = tail_bn[row.read].view(taps - 1, channels)
        padded_tc = torch.cat((tail_kc, input_tc[row.start : row.end].float()))
        window_tck = padded_tc.unfold(0, taps, 1)
        out_tc[row.start : row.end] = F.silu((window_tck * tap_kc.t()).sum(-1) + bias).to(out_tc.dtype)
        for _, end, block in row.pieces:
            last = end - row.start
            tail_bn[block] = padded_tc[last : last + taps - 1].flatten()
    return out_tc
