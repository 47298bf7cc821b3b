"""Allowed token ids: everything else gets -inf, which nothing after it can undo."""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.base import MASKED, AdmittedRow, IntArray, SampledRows
from octavo.sampling.tables import VocabTable


class AllowedTokens:
    """See `SamplingParams.allowed_token_ids`. What is allowed gets at least `MASKED`, so that it beats what is not
    even when the model itself gave -inf."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._allowed = VocabTable(num_slots, vocab_size, 1, torch.bool, device)

    def admit(self, row: AdmittedRow) -> bool:
        allowed = row.params.get("allowed_token_ids")
        if allowed is None:
            self._allowed.clear(row.slot)
            return False
        ids = np.unique(np.asarray(allowed, dtype=np.int64))
        self._allowed.stage(row.slot, ids, np.ones_like(ids), others=0)
        return True

    def flush(self) -> None:
        self._allowed.flush()

    def capture_key(self, host_slots: IntArray) -> Hashable | None:
        return self._allowed.data.data_ptr()

    def apply(self, logits_sv: Tensor, rows: SampledRows) -> None:
        logits_sv.clamp_(min=MASKED).masked_fill_(~self._allowed.data[rows.slot_s], -math.inf)
