"""Logit bias: a number added to the logits of some tokens."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from octavo.sampling.base import AdmittedRow, IntArray, SampledRows
from octavo.sampling.tables import ListTable


class LogitBias:
    """See `SamplingParams.logit_bias`."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._table = ListTable(num_slots, device)

    def admit(self, row: AdmittedRow) -> bool:
        bias = row.params.get("logit_bias") or {}
        self._table.stage(row.slot, [int(token_id) for token_id in bias], list(bias.values()))
        return bool(bias)

    def flush(self) -> None:
        self._table.flush()

    def capture_key(self, host_slots: IntArray) -> Hashable | None:
        return self._table.address

    def apply(self, logits_sv: Tensor, rows: SampledRows) -> None:
        logits_sv.scatter_add_(1, self._table.ids[rows.slot_s], self._table.values[rows.slot_s])
