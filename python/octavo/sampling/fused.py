"""The end of sampling by kernels: temperature, top-k, top-p, min-p, the draw and where tokens go, in two to six
launches that a CUDA graph can hold. It gives the tokens that the features' own torch code gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference.sample import SlotParameters
from octavo.kernels.triton.interpreter import is_interpreting, mend
from octavo.kernels.triton.launch import compile_together
from octavo.kernels.triton.sample import CHUNK_SIZES, Choice, Rows, Scratch, launches, sample
from octavo.kernels.triton.target import has_dependent_launches
from octavo.sampling.base import SampledRows, TokenTarget


class FusedChoice:
    """Kernels over the slots' parameters, and the memory they share between them."""

    def __init__(self, slots: SlotParameters, max_rows: int, vocab_size: int) -> None:
        mend()
        self._slots = slots
        self._max_rows, self._vocab_size = max_rows, vocab_size
        device = slots.divisor_s.device
        self._scratch = Scratch.allocate(max_rows, vocab_size, device)
        self._pdl = not is_interpreting() and has_dependent_launches(device)

    def choose(self, logits_sv: Tensor, rows: SampledRows, target: TokenTarget, *, draws: bool, limits: bool) -> Tensor:
        """int64 [s], valid until the next call. `draws`: some rows draw; `limits`: some of them from less than all."""
        choice = Choice.LIMITED if draws and limits else Choice.PLAIN if draws else Choice.GREEDY
        where = Rows(rows.slot_s, rows.position_s, target.last_token_s, target.output_s)
        return sample(logits_sv, where, self._slots, self._scratch, choice, pdl=self._pdl)

    def warm_up(self, *, limits: bool) -> None:
        """Compile the kernels of every size of batch: of those with top-k, top-p or min-p, or of the others."""
        choices = (Choice.LIMITED,) if limits else (Choice.GREEDY, Choice.PLAIN)
        device = self._slots.divisor_s.device
        sizes = sorted({min(most, self._max_rows) for most, _ in CHUNK_SIZES})
        ints_s = torch.zeros(1, dtype=torch.int32, device=device)
        rows = Rows(ints_s, ints_s, ints_s, ints_s)
        chosen = (
            launch
            for size in sizes
            for choice in choices
            for launch in launches(
                torch.empty(size, self._vocab_size, device=device), rows, self._slots, self._scratch, choice
            )
        )
        compile_together(chosen, pdl=self._pdl)
