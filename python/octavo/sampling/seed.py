"""Uniform numbers from a counter: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as
1, 2, 3", section 4.3) keyed by the request's seed, counted by the token's position and the sequence's index.

So a token's number depends on (seed, index, position) alone, not on the batch, the slot or what ran before.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from octavo.sampling.base import AdmittedRow, SampledRows
from octavo.sampling.tables import SlotTable

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF


def philox(counter_4s: Tensor, key_2s: Tensor) -> Tensor:
    """Ten rounds over a 128-bit counter and a 64-bit key a column; words of 32 bits held in int64.

    A product of two words may pass 2^63 and wrap, which leaves its 64 bits right: only shifts must be masked.
    """
    device = counter_4s.device
    multiplier_21 = _constant(MULTIPLIERS, device)
    weyl_21 = _constant(WEYL, device)
    x_2s, y_2s = counter_4s[0::2], counter_4s[1::2]
    for _ in range(10):
        product_2s = x_2s * multiplier_21
        high_2s = ((product_2s >> 32) & LOW).flip(0)
        x_2s, y_2s = high_2s ^ y_2s ^ key_2s, (product_2s & LOW).flip(0)
        key_2s = (key_2s + weyl_21) & LOW
    return torch.stack((x_2s[0], y_2s[0], x_2s[1], y_2s[1]))


@cache
def _constant(words: tuple[int, int], device: torch.device) -> Tensor:
    """int64 [2, 1]; copied to a device once."""
    return torch.tensor(words, dtype=torch.int64, device=device).unsqueeze(1)


def uniform(seed_s: Tensor, index_s: Tensor, position_s: Tensor) -> Tensor:
    """float64 [s] in [0, 1), 53 bits: one number for each (seed, index, position), all int64."""
    zero_s = torch.zeros_like(position_s)
    counter_4s = torch.stack((position_s & LOW, index_s & LOW, zero_s, zero_s))
    key_2s = torch.stack((seed_s & LOW, (seed_s >> 32) & LOW))
    words_4s = philox(counter_4s, key_2s)
    return ((words_4s[0] << 21) + (words_4s[1] >> 11)).double() * 2.0**-53


class Seeds:
    """Per-slot seed and index. The engine always sends a seed; the sampler asks only for rows that draw."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._seed = SlotTable(num_slots, 0, torch.int64, device)
        self._index = SlotTable(num_slots, 0, torch.int64, device)

    def admit(self, row: AdmittedRow) -> None:
        self._seed.stage(row.slot, row.params.get("seed", 0))
        self._index.stage(row.slot, row.index)

    def flush(self) -> None:
        self._seed.flush()
        self._index.flush()

    def uniform_s(self, rows: SampledRows) -> Tensor:
        """float64 [s] in [0, 1): the numbers of the rows' new tokens."""
        return uniform(self._seed.data[rows.slot_s], self._index.data[rows.slot_s], rows.position_s)
