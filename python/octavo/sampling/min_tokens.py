"""Minimum output length: end-of-sequence and stop ids are masked until it is reached."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from octavo.sampling.base import MASKED, AdmittedRow, IntArray, SampledRows
from octavo.sampling.tables import ListTable, SlotTable


class MinTokens:
    """See `SamplingParams.min_tokens`. The ids are `eos_token_ids` and `stop_token_ids` of the wire parameters."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._stops = ListTable(num_slots, device)
        self._end = SlotTable(num_slots, 0, torch.int64, device)
        """First position at which a stop is allowed."""

    def admit(self, row: AdmittedRow) -> bool:
        min_tokens = row.params.get("min_tokens", 0)
        named = {*row.params.get("eos_token_ids", ()), *row.params.get("stop_token_ids", ())}
        stops = sorted(token_id for token_id in named if token_id < self._vocab_size)
        used = min_tokens > 0 and bool(stops)
        if not used:
            stops = []
        self._stops.stage(row.slot, stops, [MASKED] * len(stops))
        self._end.stage(row.slot, len(row.prompt_ids) + min_tokens if used else 0)
        return used

    def flush(self) -> None:
        self._stops.flush()
        self._end.flush()

    def capture_key(self, host_slots: IntArray) -> Hashable | None:
        return self._stops.address

    def apply(self, logits_sv: Tensor, rows: SampledRows) -> None:
        early_s = rows.position_s < self._end.data[rows.slot_s]
        mask_sw = self._stops.values[rows.slot_s] * early_s.unsqueeze(1)
        logits_sv.scatter_add_(1, self._stops.ids[rows.slot_s], mask_sw)
