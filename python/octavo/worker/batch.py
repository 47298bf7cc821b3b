"""The step's arenas: host buffers that the control plane fills, their copy on the device, and views by name.

A step's arrays travel in one host-to-device copy; its results in one copy back. On CPU there is one memory, and nothing
is copied. Not here: what the arrays mean for a model (runner.py).

Shape suffixes: r rows, t tokens, u block updates, c block copies, s sampled rows, p tokens a sampled row, k logprobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from octavo._core import ArenaLayout, OutputLayout, StepPlan
    from octavo.sampling.logprobs import TokenLogprobs


DECODE_ROWS, SAMPLED_ROWS = 2, 3
SHARED_BLOCKS = 11
"""A slot, then a number."""
"""Places in the arena's header (rust/core/src/arena.rs)."""


def host_buffers(num_ints: int, count: int, device: torch.device) -> list[Tensor]:
    """int32 host tensors, pinned for CUDA so that copies don't wait."""
    return [torch.zeros(num_ints, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(count)]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Views of a step's arena on the device, int32, cut to the rows and tokens that run (padding included)."""

    row_slot_r: Tensor
    query_start_r: Tensor
    """One entry more than rows."""
    kv_len_r: Tensor
    token_id_t: Tensor
    position_t: Tensor


class StepArenas:
    """`count` host arenas and their device copy. On CUDA the copy has one address for all steps (graphs rely on it):
    a step's upload waits, on the stream, for the kernels of the step before."""

    def __init__(self, layout: ArenaLayout, *, count: int, null_slot: int, device: torch.device) -> None:
        self.layout = layout
        self._null_slot = null_slot
        self._host = host_buffers(layout.num_ints, count, device)
        self.host_arrays: list[npt.NDArray[np.int32]] = [buffer.numpy() for buffer in self._host]
        self._device = torch.zeros_like(self._host[0], device=device) if device.type == "cuda" else None

    def host_slots(self, plan: StepPlan) -> npt.NDArray[np.int32]:
        """Slots of the sampled rows."""
        start = self.layout.row_slot
        return self.host_arrays[plan.arena][start : start + plan.num_sampled]

    def pad(self, arena: int, first: int, num_rows: int) -> None:
        """Fill rows [first, num_rows) after rows of one token each: one token of the null slot, in the null block."""
        layout, array = self.layout, self.host_arrays[arena]
        array[layout.row_slot + first : layout.row_slot + num_rows] = self._null_slot
        array[layout.query_start + first : layout.query_start + num_rows + 1] = np.arange(first, num_rows + 1)
        array[layout.kv_len + first : layout.kv_len + num_rows] = 1
        array[layout.token_id + first : layout.token_id + num_rows] = 0
        array[layout.position + first : layout.position + num_rows] = 0

    def pad_empty(self, arena: int, first: int, num_rows: int, num_tokens: int) -> None:
        """Fill rows [first, num_rows) after a step's `num_tokens` tokens: rows of the null slot without tokens."""
        layout, array = self.layout, self.host_arrays[arena]
        array[layout.row_slot + first : layout.row_slot + num_rows] = self._null_slot
        array[layout.query_start + first : layout.query_start + num_rows + 1] = num_tokens
        array[layout.kv_len + first : layout.kv_len + num_rows] = 1

    def fill_null_rows(self, arena: int, num_rows: int, length: int) -> None:
        """Make a step of `num_rows` rows of the null slot, `length` tokens each: a trial of the largest sizes."""
        layout, array = self.layout, self.host_arrays[arena]
        self.pad(arena, 0, num_rows)
        array[layout.header + DECODE_ROWS] = num_rows if length == 1 else 0
        array[layout.header + SAMPLED_ROWS] = num_rows
        array[layout.header + SHARED_BLOCKS : layout.header + SHARED_BLOCKS + 2] = 0
        array[layout.query_start : layout.query_start + num_rows + 1] = np.arange(num_rows + 1) * length
        array[layout.kv_len : layout.kv_len + num_rows] = length
        array[layout.token_id : layout.token_id + num_rows * length] = 0
        array[layout.position : layout.position + num_rows * length] = np.tile(np.arange(length), num_rows)

    def upload(self, arena: int) -> Tensor:
        """Start the copy of a host arena; the arena on the device."""
        if self._device is None:
            return self._host[arena]
        return self._device.copy_(self._host[arena], non_blocking=True)

    def arrays(self, arena: Tensor, num_rows: int, num_tokens: int) -> StepArrays:
        """What the forward pass reads."""
        layout = self.layout
        return StepArrays(
            row_slot_r=arena.narrow(0, layout.row_slot, num_rows),
            query_start_r=arena.narrow(0, layout.query_start, num_rows + 1),
            kv_len_r=arena.narrow(0, layout.kv_len, num_rows),
            token_id_t=arena.narrow(0, layout.token_id, num_tokens),
            position_t=arena.narrow(0, layout.position, num_tokens),
        )

    def counts(self, arena: Tensor) -> tuple[Tensor, Tensor]:
        """How many rows decode, and how many are sampled: [1] each, from the header."""
        header = self.layout.header
        return arena.narrow(0, header + DECODE_ROWS, 1), arena.narrow(0, header + SAMPLED_ROWS, 1)

    def share_blocks(self, plan: StepPlan) -> bool:
        """Whether the rows of a step, which all decode, begin with the same blocks."""
        return bool(self.host_arrays[plan.arena][self.layout.header + SHARED_BLOCKS + 1] > 0)

    def shared_blocks(self, arena: Tensor) -> Tensor:
        """(a slot, how many of its first blocks other decode rows have too), from the header."""
        return arena.narrow(0, self.layout.header + SHARED_BLOCKS, 2)

    def updates(self, arena: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Block updates [u, 3] (slot, index, block) and block copies [c, 2] (source, destination)."""
        count, copies = plan.num_block_updates, plan.num_block_copies
        return (
            arena.narrow(0, self.layout.block_update, 3 * count).view(count, 3),
            arena.narrow(0, self.layout.block_copy, 2 * copies).view(copies, 2),
        )


class OutputViews:
    """Named regions of one output buffer."""

    def __init__(self, layout: OutputLayout, buffer: Tensor) -> None:
        rows, width = layout.max_rows, layout.max_sampled
        entries = rows * width * (1 + layout.max_logprobs)
        self.buffer = buffer
        self.sampled_sp = buffer.narrow(0, layout.sampled, rows * width).view(rows, width)
        self.rank_sp = buffer.narrow(0, layout.rank, rows * width).view(rows, width)
        self.logprob_id_spk = buffer.narrow(0, layout.logprob_id, entries).view(rows, width, -1)
        self.logprob_value_spk = buffer.narrow(0, layout.logprob_value, entries).view(rows, width, -1)
        buffer.narrow(0, layout.count, rows).fill_(1)


class OutputArenas:
    """Results of steps: written on the device, copied to one of `count` host arenas, where the control plane reads."""

    def __init__(self, layout: OutputLayout, *, count: int, device: torch.device) -> None:
        self._without_logprobs = min(layout.logprob_id, layout.logprob_value)
        host = host_buffers(layout.num_ints, count, device)
        self._host = [OutputViews(layout, buffer) for buffer in host]
        self.host_arrays: list[npt.NDArray[np.int32]] = [buffer.numpy() for buffer in host]
        buffer = torch.zeros_like(host[0], device=device)
        self._device = OutputViews(layout, buffer) if device.type == "cuda" else None

    def tokens(self, arena: int, rows: slice) -> Tensor:
        """int32, one a row: where the rows' tokens belong."""
        return (self._device or self._host[arena]).sampled_sp[rows, 0]

    def put_logprobs(self, arena: int, rows: slice, logprobs: TokenLogprobs) -> None:
        """Logprobs of the rows' tokens."""
        target = self._device or self._host[arena]
        width = logprobs.id_sk.shape[1]
        target.rank_sp[rows, 0] = logprobs.rank_s
        target.logprob_id_spk[rows, 0, :width] = logprobs.id_sk
        target.logprob_value_spk[rows, 0, :width] = logprobs.value_sk.view(torch.int32)

    def download(self, arena: int, *, needs_logprobs: bool) -> None:
        """Start the copy to the host; on CPU there is nothing to copy."""
        if self._device is not None:
            host, device = self._host[arena].buffer, self._device.buffer
            size = device.shape[0] if needs_logprobs else self._without_logprobs
            host[:size].copy_(device[:size], non_blocking=True)
