"""Seeds: the uniform numbers of a token depend on (seed, sequence index, position) alone, not on the batch, the slot or
what ran before. The generator is `octavo.kernels.reference.uniform` (on CUDA its Triton twin: one launch).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from octavo.sampling.base import AdmittedRow, SampledRows
from octavo.sampling.tables import SlotTable

GENERATORS = {"cuda": "octavo.kernels.triton.uniform"}
"""Device -> module, if it is not `REFERENCE`."""
REFERENCE = "octavo.kernels.reference.uniform"


class Seeds:
    """Per-slot seed and index. The engine always sends a seed; the sampler asks only for rows that draw."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._seed = SlotTable(num_slots, 0, torch.int64, device)
        self._index = SlotTable(num_slots, 0, torch.int64, device)
        module = import_module(GENERATORS.get(device.type, REFERENCE))
        self._uniform: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor] = module.uniform

    def admit(self, row: AdmittedRow) -> None:
        self._seed.stage(row.slot, row.params.get("seed", 0))
        self._index.stage(row.slot, row.params.get("first_choice", 0) + row.index)

    def flush(self) -> None:
        self._seed.flush()
        self._index.flush()

    @property
    def keys(self) -> tuple[Tensor, Tensor]:
        """Seed and index a slot, int64."""
        return self._seed.data, self._index.data

    def uniform_su(self, rows: SampledRows, num_uniforms: int) -> Tensor:
        """float64 [s, u] in [0, 1): the numbers of the rows' new tokens."""
        return self._uniform(self._seed.data, self._index.data, rows.slot_s, rows.position_s, num_uniforms)
