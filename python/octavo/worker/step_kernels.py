"""The two kernels that turn an arena into a forward pass's inputs, from `octavo.kernels`.

Triton beside Triton attention, else plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Protocol

from torch import Tensor

from octavo.kernels.reference.last_rows import SampledInputs
from octavo.worker.batch import StepArrays
from octavo.worker.slots import Slots

PACKAGES = dict.fromkeys(("triton", "flash", "flashinfer"), "octavo.kernels.triton")
"""Attention backend -> package, if it is not `REFERENCE`."""
REFERENCE = "octavo.kernels.reference"


class PreparedTokens(Protocol):
    """See `octavo.kernels.reference.prepare.PreparedTokens`."""

    token_id_t: Tensor
    position_t: Tensor
    slot_mapping_gt: Tensor


class StepKernels:
    """Bound to an attention backend's package and a block size."""

    def __init__(self, backend: str, block_size: int) -> None:
        self._package = package = PACKAGES.get(backend, REFERENCE)
        if package != REFERENCE:
            import_module("octavo.worker.kernel_cache").share()
        self._block_size = block_size
        self._prepare: Callable[..., PreparedTokens] = import_module(f"{package}.prepare").prepare_step
        self._apply: Callable[..., None] = import_module(f"{package}.apply_updates").apply_updates
        self._gather: Callable[..., None] = import_module(f"{package}.last_rows").gather_last_rows

    def compile_only(self) -> AbstractContextManager[None] | None:
        """Within it, the kernels of eager steps are compiled together instead of run; None where nothing compiles."""
        if self._package == REFERENCE:
            return None
        compiling: Callable[[], AbstractContextManager[None]] = import_module(f"{self._package}.handles").compiling
        return compiling()

    def gather_last_rows(
        self, hidden_tm: Tensor, arrays: StepArrays, out: SampledInputs, count: int | Tensor, null_slot: int
    ) -> None:
        """Hidden state of the last token, slot and length of the step's first `count` rows; null rows after them."""
        self._gather(
            hidden_tm, arrays.query_start_r, arrays.row_slot_r, arrays.kv_len_r, out, count=count, null_slot=null_slot
        )

    def apply_updates(self, slots: Slots, update_u3: Tensor, kv_caches: Sequence[Tensor], copy_c2: Tensor) -> None:
        """Set block table entries (row of the groups' tables together, index, block), then copy blocks (source,
        destination) in every cache."""
        if update_u3.shape[0] or copy_c2.shape[0]:
            self._apply(slots.block_table_gsb.flatten(0, 1), update_u3, kv_caches, copy_c2)

    def prepare(self, arrays: StepArrays, slots: Slots) -> PreparedTokens:
        """Token ids (-1 replaced by the slot's newest token), positions, and where K and V go."""
        return self._prepare(
            arrays.token_id_t,
            arrays.position_t,
            arrays.row_slot_r,
            arrays.query_start_r,
            slots.block_table_gsb,
            slots.last_token_s,
            block_size=self._block_size,
        )
