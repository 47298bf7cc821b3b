"""Structured outputs: tokens that a sequence's grammar forbids get -inf, which nothing after it can undo.

Which tokens those are, the control plane writes into `host` before every step that needs it (`Core.fill_masks`); here
they are brought to the device and applied.

Shape suffixes: s slots (and the null slot), w words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from importlib import import_module

import torch
from torch import Tensor

from octavo.sampling.base import AdmittedRow, IntArray, SampledRows


class GrammarMasks:
    """See `SamplingParams.structured_outputs`. Slots without a grammar have masks that forbid nothing."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, *, fused: bool = False) -> None:
        shape = (num_slots, -(-vocab_size // 32))
        on_cuda = device.type == "cuda"
        self.host = torch.full(shape, -1, dtype=torch.int32, pin_memory=on_cuda)
        """One row a slot; the control plane's to write."""
        self._device = device
        self._mask_sw: Tensor | None = None
        package = "octavo.kernels.triton" if fused else "octavo.kernels.reference"
        self._apply: Callable[[Tensor, Tensor, Tensor], None] = import_module(f"{package}.token_mask").apply_token_mask

    def admit(self, row: AdmittedRow) -> bool:
        return bool(row.params.get("is_constrained"))

    def flush(self) -> None:
        """Nothing is staged."""

    def upload(self, host_slots: IntArray) -> None:
        """Start the copy of these slots' masks. Allocates at its first call: few engines have any."""
        num_slots = int(host_slots.max()) + 1
        if self._mask_sw is None:
            shape = (self.host.shape[0] + 1, self.host.shape[1])
            self._mask_sw = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        self._mask_sw[:num_slots].copy_(self.host[:num_slots], non_blocking=True)

    def capture_key(self, host_slots: IntArray) -> Hashable | None:
        return None if self._mask_sw is None else self._mask_sw.data_ptr()

    def apply(self, logits_sv: Tensor, rows: SampledRows) -> None:
        assert self._mask_sw is not None, "masks are uploaded before they are applied"
        self._apply(logits_sv, rows.slot_s, self._mask_sw)
