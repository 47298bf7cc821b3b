"""State of every slot on the device: its block table and its newest token. Slot `num_slots` is the null slot, whose
rows pad a batch: its table names the null block only.

Not here: sampling state (octavo.sampling), which slot is free (Rust).
"""

from __future__ import annotations

import torch


class Slots:
    """`block_table_sb` int32 [num_slots + 1, max_blocks], `last_token_s` int32 [num_slots + 1]."""

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self.null_slot = num_slots
        self.block_table_sb = torch.zeros((num_slots + 1, max_blocks), dtype=torch.int32, device=device)
        self.last_token_s = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
