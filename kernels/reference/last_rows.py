"""Bring what sampling reads of a step to fixed places: the hidden state of each row's last token, slots and positions.

Shape suffixes: t tokens, r rows of the step, s sampled rows (the first rows, then padding), m model dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SampledInputs(NamedTuple):
    """Fixed places for some number of rows."""

    hidden_sm: Tensor
    slot_s: Tensor
    """int32"""
    position_s: Tensor
    """int32: the position that the new token takes, which is the row's length."""


def gather_last_rows(
    hidden_tm: Tensor,
    query_start_r: Tensor,
    slot_r: Tensor,
    kv_len_r: Tensor,
    out: SampledInputs,
    *,
    count: int | Tensor,
    null_slot: int,
) -> None:
    """Fill `out`: the first `count` rows from the step's, the others with any hidden state, the null slot, and 1.
    `count` may be int32 [1] on the device."""
    count = int(count)
    size = out.slot_s.shape[0]
    token_s = torch.zeros(size, dtype=torch.int64, device=hidden_tm.device)
    token_s[:count] = query_start_r[1 : count + 1] - 1
    out.hidden_sm.copy_(hidden_tm[token_s])
    out.slot_s.fill_(null_slot)[:count] = slot_r[:count]
    out.position_s.fill_(1)[:count] = kv_len_r[:count]
