"""Min-p (Nguyen et al. 2024): tokens less probable than a fraction of the most probable one are not drawn."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.sampling.base import AdmittedRow, SampledRows
from octavo.sampling.tables import SlotTable


class MinP:
    """See `SamplingParams.min_p`. Works on logits: p >= min_p * p_max is logit >= logit_max + log(min_p)."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._log = SlotTable(num_slots, -math.inf, torch.float32, device)

    def admit(self, row: AdmittedRow) -> bool:
        min_p = row.params.get("min_p", 0.0)
        self._log.stage(row.slot, math.log(min_p) if min_p > 0 else -math.inf)
        return bool(min_p > 0) and row.is_random

    def flush(self) -> None:
        self._log.flush()

    @property
    def log(self) -> Tensor:
        """float32 a slot: log(min_p), -inf for none."""
        return self._log.data

    def apply(self, logits_sv: Tensor, rows: SampledRows) -> None:
        threshold_s1 = logits_sv.amax(1, keepdim=True) + self._log.data[rows.slot_s].unsqueeze(1)
        logits_sv.masked_fill_(logits_sv < threshold_s1, -torch.inf)
