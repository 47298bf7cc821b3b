"""Allowed token ids: everything else gets -inf, which nothing after it can undo."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.base import MASKED, AdmittedRow, SampledRows
from octavo.sampling.tables import VocabTable


class AllowedTokens:
    """See `SamplingParams.allowed_token_ids`. What is allowed gets at least `MASKED`, so that it beats what is not
    even when the model itself gave -inf."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._limited = np.zeros(num_slots + 1, dtype=np.bool_)
        self._allowed = VocabTable(num_slots, vocab_size, 1, torch.bool, device)
        self._vocab_size = vocab_size

    def admit(self, row: AdmittedRow) -> bool:
        allowed = row.params.get("allowed_token_ids")
        if allowed is None:
            self._allowed.clear(row.slot)
            return False
        forbidden = np.setdiff1d(np.arange(self._vocab_size), np.asarray(allowed, dtype=np.int64))
        self._allowed.stage(row.slot, forbidden, np.zeros(len(forbidden), dtype=np.int64))
        return True

    def flush(self) -> None:
        self._allowed.flush()

    def apply(self, logits_sv: Tensor, rows: SampledRows) -> None:
        logits_sv.clamp_(min=MASKED).masked_fill_(~self._allowed.data[rows.slot_s], -math.inf)
