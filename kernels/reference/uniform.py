"""Uniform numbers from a counter: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as
1, 2, 3", section 4.3). A number depends on its seed, index, position and column alone.

Shape suffixes: s slots, r rows, c columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF


def philox(counter_4r: Tensor, key_2r: Tensor) -> Tensor:
    """Ten rounds over a 128-bit counter and a 64-bit key a column; words of 32 bits held in int64.

    A product of two words may pass 2^63 and wrap, which leaves its 64 bits right: only shifts must be masked.
    """
    multiplier_21 = torch.tensor(MULTIPLIERS, device=counter_4r.device).unsqueeze(1)
    weyl_21 = torch.tensor(WEYL, device=counter_4r.device).unsqueeze(1)
    x_2r, y_2r = counter_4r[0::2], counter_4r[1::2]
    for _ in range(10):
        product_2r = x_2r * multiplier_21
        high_2r = ((product_2r >> 32) & LOW).flip(0)
        x_2r, y_2r = high_2r ^ y_2r ^ key_2r, (product_2r & LOW).flip(0)
        key_2r = (key_2r + weyl_21) & LOW
    return torch.stack((x_2r[0], y_2r[0], x_2r[1], y_2r[1]))


def uniform(seed_s: Tensor, index_s: Tensor, slot_r: Tensor, position_r: Tensor, num_columns: int) -> Tensor:
    """float64 [r, c] in [0, 1), 53 bits: numbers of each row's (seed of its slot, index of its slot, position).

    All int64; the seed is the key, the low words of position, index and column are the counter.
    """
    num_rows = len(slot_r)
    column_rc = torch.arange(num_columns, device=slot_r.device).expand(num_rows, -1)
    seed_rc, index_rc, position_rc = (
        value_r.unsqueeze(1).expand_as(column_rc) for value_r in (seed_s[slot_r], index_s[slot_r], position_r)
    )
    counter = torch.stack((position_rc & LOW, index_rc & LOW, column_rc, torch.zeros_like(column_rc)))
    key = torch.stack((seed_rc & LOW, (seed_rc >> 32) & LOW))
    words = philox(counter.flatten(1), key.flatten(1))
    return ((words[0] << 21) + (words[1] >> 11)).double().mul_(2.0**-53).view(num_rows, num_columns)
