"""Presence, frequency and repetition penalties, from counts kept per slot on the device.

Counts are rebuilt at admission from the tokens the sequence has, and then follow the tokens chosen. Order as in vLLM:
repetition (over prompt and output; Keskar et al. 2019, section 4.1), then frequency and presence (over output).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.base import AdmittedRow, IntArray, SampledRows
from octavo.sampling.tables import SlotTable, VocabTable


class Penalties:
    """See `SamplingParams.presence_penalty`, `frequency_penalty` and `repetition_penalty`."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, *, fused: bool = False) -> None:
        self._presence = SlotTable(num_slots, 0.0, torch.float32, device)
        self._frequency = SlotTable(num_slots, 0.0, torch.float32, device)
        self._repetition = SlotTable(num_slots, 1.0, torch.float32, device)
        self._in_prompt = VocabTable(num_slots, vocab_size, 0, torch.bool, device)
        self._count = VocabTable(num_slots, vocab_size, 0, torch.int32, device)
        package = "octavo.kernels.triton" if fused else "octavo.kernels.reference"
        self._apply: Callable[..., None] = import_module(f"{package}.penalties").apply_penalties

    def admit(self, row: AdmittedRow) -> bool:
        presence = row.params.get("presence_penalty", 0.0)
        frequency = row.params.get("frequency_penalty", 0.0)
        repetition = row.params.get("repetition_penalty", 1.0)
        self._presence.stage(row.slot, presence)
        self._frequency.stage(row.slot, frequency)
        self._repetition.stage(row.slot, repetition)
        if (presence, frequency, repetition) == (0.0, 0.0, 1.0):
            return False
        prompt_ids = np.unique(row.prompt_ids).astype(np.int64)
        self._in_prompt.stage(row.slot, prompt_ids, np.ones_like(prompt_ids), others=0)
        output_ids, counts = np.unique(row.output_ids, return_counts=True)
        self._count.stage(row.slot, output_ids.astype(np.int64), counts.astype(np.int64), others=0)
        return True

    def flush(self) -> None:
        for table in (self._presence, self._frequency, self._repetition, self._in_prompt, self._count):
            table.flush()

    def capture_key(self, host_slots: IntArray) -> Hashable | None:
        return self._in_prompt.data.data_ptr(), self._count.data.data_ptr()

    def apply(self, logits_sv: Tensor, rows: SampledRows) -> None:
        self._apply(
            logits_sv,
            rows.slot_s,
            self._in_prompt.data,
            self._count.data,
            self._repetition.data,
            self._frequency.data,
            self._presence.data,
        )

    def observe(self, rows: SampledRows, token_s: Tensor) -> None:
        self._count.data[rows.slot_s, token_s] += 1
