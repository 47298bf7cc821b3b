"""State of every slot on the device: its block tables and its newest token. Slot `num_slots` is the null slot, whose
rows pad a batch: its tables name the null block only.

Not here: sampling state (octavo.sampling), which slot is free (Rust).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.attention.base import Places


class Slots:
    """`block_table_gsb` int32 [num_groups, num_slots + 1, max_blocks or more], `last_token_s` int32 [num_slots + 1]."""

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device, layer_groups: Sequence[int] = ()) -> None:
        """`layer_groups`: of each layer; empty: there is one group."""
        self.null_slot = num_slots
        self.layer_groups = layer_groups
        num_groups = 1 + max(layer_groups, default=0)
        if num_groups > 1:  # every group's table begins at a multiple of 16 bytes, as kernels were compiled for
            max_blocks += -max_blocks % 4
        self.block_table_gsb = torch.zeros((num_groups, num_slots + 1, max_blocks), dtype=torch.int32, device=device)
        self._tables = self.block_table_gsb.unbind(0)
        self.last_token_s = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)

    def places(self, slot_mapping_gt: Tensor) -> list[Places]:
        """Of a step's tokens, in each cache group."""
        return [Places(*pair) for pair in zip(self._tables, slot_mapping_gt.unbind(0), strict=True)]
