"""Top-k, then top-p of what top-k left (Holtzman et al. 2020, nucleus sampling): one sort serves both.

Every row gets a threshold and loses the logits below it, so tokens that tie with the last one kept are kept too. Sums
are over integers: exact, and so independent of the batch and of the order of addition.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.base import AdmittedRow, SampledRows
from octavo.sampling.draw import integer_weights
from octavo.sampling.tables import SlotTable

ALL = 2**31 - 1


class TopKTopP:
    """See `SamplingParams.top_k` and `top_p`. The most probable token is always kept."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._k = SlotTable(num_slots, ALL, torch.int64, device)
        self._p = SlotTable(num_slots, 1.0, torch.float64, device)
        self._host_k = np.zeros(num_slots + 1, dtype=np.int64)
        """How many of the largest logits the slot's threshold depends on; 0 for slots without one."""

    def admit(self, row: AdmittedRow) -> bool:
        k = row.params.get("top_k", 0)
        p = float(row.params.get("top_p", 1.0))
        limit = k if k > 0 else ALL
        used = row.is_random and (limit != ALL or p < 1.0)
        self._k.stage(row.slot, limit)
        self._p.stage(row.slot, p)
        self._host_k[row.slot] = limit if used else 0
        return used

    def flush(self) -> None:
        self._k.flush()
        self._p.flush()

    @property
    def limits(self) -> tuple[Tensor, Tensor]:
        """k (int64; `ALL` for no limit) and p (float64) a slot."""
        return self._k.data, self._p.data

    def apply(self, logits_sv: Tensor, rows: SampledRows) -> None:
        k_s1 = self._k.data[rows.slot_s].unsqueeze(1)
        p_s1 = self._p.data[rows.slot_s].unsqueeze(1)
        all_s1 = k_s1 == ALL
        weight_sv = integer_weights(logits_sv, logits_sv.amax(1, keepdim=True))
        total_s1 = weight_sv.sum(1, keepdim=True)
        width = min(int(self._host_k[rows.host_slots].max()), logits_sv.shape[1])
        if width == logits_sv.shape[1] and logits_sv.device.type == "cpu":
            width = _candidates(weight_sv, total_s1, k_s1, p_s1)
        if width < logits_sv.shape[1]:
            top_sw = logits_sv.topk(width, dim=1).values
        else:
            top_sw = logits_sv.sort(dim=1, descending=True).values
        place_w = torch.arange(width, device=logits_sv.device)
        weight_sw = integer_weights(top_sw, top_sw[:, :1]).masked_fill_(place_w >= k_s1, 0)
        sum_sw = weight_sw.cumsum(1)
        mass_s1 = p_s1 * torch.where(all_s1, total_s1, sum_sw[:, -1:])
        kept_sw = ((sum_sw - weight_sw < mass_s1) | (p_s1 >= 1.0)) & (place_w < k_s1)
        last_s1 = kept_sw.sum(1, keepdim=True).sub_(1).clamp_(min=0)
        threshold_s1 = top_sw.gather(1, last_s1)
        unlimited_s1 = all_s1 & (p_s1 >= 1.0)
        logits_sv.masked_fill_((logits_sv < threshold_s1) & ~unlimited_s1, -torch.inf)


def _candidates(weight_sv: Tensor, total_s1: Tensor, k_s1: Tensor, p_s1: Tensor) -> int:
    """How many of a row's most probable tokens can matter, at most over the rows; asks the device, so for CPU only.

    Tokens lighter than (1 - p) * total / v weigh less than (1 - p) * total together: the others reach p without them.
    """
    light_s1 = ((1.0 - p_s1) * total_s1 / weight_sv.shape[1] * (1.0 - 1e-6)).long()
    nucleus_s1 = (weight_sv >= light_s1).sum(1, keepdim=True)
    needed_s1 = torch.where(k_s1 == ALL, torch.where(p_s1 < 1.0, nucleus_s1, 1), k_s1)
    return min(int(needed_s1.max()), weight_sv.shape[1])
