"""Turn a step's arena into what the model reads: token ids, positions, and where each token's K and V go.

Shape suffixes: t tokens, r rows, g cache groups, s slots, b blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PreparedTokens(NamedTuple):
    """Inputs of the forward pass, all int64; [t] but the last."""

    token_id_t: Tensor
    position_t: Tensor
    slot_mapping_gt: Tensor
    """block * block_size + offset, in every cache group."""


def prepare_step(
    token_id_t: Tensor,
    position_t: Tensor,
    row_slot_r: Tensor,
    query_start_r: Tensor,
    block_table_gsb: Tensor,
    last_token_s: Tensor,
    *,
    block_size: int,
) -> PreparedTokens:
    """Resolve token id -1 to the slot's last sampled token and find every token's place in the cache.

    query_start has one entry more than row_slot. Tokens at or after query_start[-1] are padding: token 0, position 0,
    place 0 (the null block).
    """
    token_t = torch.arange(token_id_t.shape[0], device=token_id_t.device, dtype=query_start_r.dtype)
    row_t = torch.searchsorted(query_start_r[1:].contiguous(), token_t, right=True)
    real_t = row_t < row_slot_r.shape[0]
    slot_t = row_slot_r[row_t.clamp(max=row_slot_r.shape[0] - 1)].long()
    token = torch.where(token_id_t < 0, last_token_s[slot_t].long(), token_id_t.long())
    position = position_t.long() * real_t
    block_gt = block_table_gsb[:, slot_t, position // block_size].long()
    return PreparedTokens(token * real_t, position, (block_gt * block_size + position % block_size) * real_t)
