"""Temperature: logits are divided by it; 0 is greedy, which the sampler reads from here."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.sampling.base import AdmittedRow, SampledRows
from octavo.sampling.tables import SlotTable


class Temperature:
    """See `SamplingParams.temperature`. Also says for which rows a token is drawn."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._divisor = SlotTable(num_slots, 1.0, torch.float32, device)
        self._random = SlotTable(num_slots, False, torch.bool, device)

    def admit(self, row: AdmittedRow) -> bool:
        divisor = row.temperature if row.is_random else 1.0
        self._random.stage(row.slot, row.is_random)
        self._divisor.stage(row.slot, divisor)
        return divisor != 1.0

    def flush(self) -> None:
        self._divisor.flush()
        self._random.flush()

    def apply(self, logits_sv: Tensor, rows: SampledRows) -> None:
        logits_sv.div_(self._divisor.data[rows.slot_s].unsqueeze(1))

    @property
    def divisor(self) -> Tensor:
        """float32 a slot."""
        return self._divisor.data

    @property
    def random(self) -> Tensor:
        """bool a slot."""
        return self._random.data

    def random_s(self, rows: SampledRows) -> Tensor:
        """bool [s]: which rows are drawn."""
        return self._random.data[rows.slot_s]
