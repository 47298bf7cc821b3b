"""What sampling reads of a step, at fixed addresses: so one captured graph samples after steps of any kind.

A decode step from a graph needs none of this: its own tensors stay where they are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels.reference.last_rows import SampledInputs
from octavo.worker.batch import StepArrays
from octavo.worker.step_kernels import StepKernels


class FixedRows:
    """Room for `max_rows` rows of hidden states."""

    def __init__(
        self, kernels: StepKernels, max_rows: int, width: int, dtype: torch.dtype, device: torch.device, null_slot: int
    ) -> None:
        self._kernels = kernels
        self._null_slot = null_slot
        self._inputs = SampledInputs(
            torch.zeros(max_rows, width, dtype=dtype, device=device),
            torch.zeros(max_rows, dtype=torch.int32, device=device),
            torch.zeros(max_rows, dtype=torch.int32, device=device),
        )

    @property
    def hidden_sm(self) -> Tensor:
        """All of the room."""
        return self._inputs.hidden_sm

    def fill(self, hidden_tm: Tensor, arrays: StepArrays, count: int | Tensor, size: int) -> tuple[Tensor, StepArrays]:
        """`rows` of the step: the last tokens of its first `count` rows (int32 [1] where the device knows), then
        padding."""
        inputs = SampledInputs(*(part[:size] for part in self._inputs))
        self._kernels.gather_last_rows(hidden_tm, arrays, inputs, count, self._null_slot)
        return self.rows(arrays, size)

    def rows(self, arrays: StepArrays, size: int) -> tuple[Tensor, StepArrays]:
        """(hidden states [size, m], arrays whose slots and lengths are those of the rows), as they were filled."""
        inputs = SampledInputs(*(part[:size] for part in self._inputs))
        return inputs.hidden_sm, replace(arrays, row_slot_r=inputs.slot_s, kv_len_r=inputs.position_s)
