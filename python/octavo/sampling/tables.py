"""Per-slot state on the device: one row a slot, staged on the host at admission, flushed with one copy per array.

The last row belongs to the null slot of padding rows and keeps the default. Tables as wide as the vocabulary are
allocated at their first use.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IdArray = npt.NDArray[np.int64]


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to the device, without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)


def start_download(tensor: Tensor) -> Tensor:
    """Start a copy to the host; valid once the stream has come so far (at once on CPU)."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class SlotTable:
    """One number a slot: `data` is [num_slots + 1]."""

    def __init__(self, num_slots: int, default: float, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.full((num_slots + 1,), default, dtype=dtype, device=device)
        self._default = default
        self._changed = np.zeros(num_slots + 1, dtype=np.bool_)
        self._staged: dict[int, float] = {}

    def stage(self, slot: int, value: float) -> None:
        """Give a slot its value at the next flush; nothing is copied for a default over a default."""
        if value != self._default or self._changed[slot]:
            self._staged[slot] = value
            self._changed[slot] = value != self._default

    def flush(self) -> None:
        if not self._staged:
            return
        device = self.data.device
        slots = upload(np.fromiter(self._staged, np.int64), device)
        values = torch.tensor(list(self._staged.values()), dtype=self.data.dtype)
        self.data[slots] = upload(values.numpy(), device)
        self._staged.clear()


class ListTable:
    """A short list of (token id, value) a slot: `ids` and `values` are [num_slots + 1, width], padded with (0, 0.0).

    The width grows to the longest list admitted, in powers of two.
    """

    def __init__(self, num_slots: int, device: torch.device, width: int = 8) -> None:
        self.ids = torch.zeros((num_slots + 1, width), dtype=torch.int64, device=device)
        self.values = torch.zeros((num_slots + 1, width), dtype=torch.float32, device=device)
        self._filled = np.zeros(num_slots + 1, dtype=np.bool_)
        self._staged: dict[int, tuple[Sequence[int], Sequence[float]]] = {}

    def stage(self, slot: int, ids: Sequence[int], values: Sequence[float]) -> None:
        """Give a slot its list at the next flush; an empty one costs nothing where none was."""
        if ids or self._filled[slot]:
            self._staged[slot] = (ids, values)
            self._filled[slot] = bool(ids)

    def flush(self) -> None:
        if not self._staged:
            return
        self._widen(max(len(ids) for ids, _ in self._staged.values()))
        shape = (len(self._staged), self.ids.shape[1])
        ids, values = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
        for i, (row_ids, row_values) in enumerate(self._staged.values()):
            ids[i, : len(row_ids)] = row_ids
            values[i, : len(row_ids)] = row_values
        device = self.ids.device
        slots = upload(np.fromiter(self._staged, np.int64), device)
        self.ids[slots] = upload(ids, device)
        self.values[slots] = upload(values, device)
        self._staged.clear()

    @property
    def address(self) -> tuple[int, int, int]:
        """Where the lists lie, and their width."""
        return self.ids.data_ptr(), self.values.data_ptr(), self.ids.shape[1]

    def _widen(self, need: int) -> None:
        width = self.ids.shape[1]
        if need > width:
            extra = (1 << (need - 1).bit_length()) - width
            self.ids = torch.nn.functional.pad(self.ids, (0, extra))
            self.values = torch.nn.functional.pad(self.values, (0, extra))


class VocabTable:
    """One value a slot and token: `data` is [num_slots + 1, vocab_size], allocated at the first flush of anything.

    Rows are staged sparsely: some token ids with their values, and the value of all others.
    """

    def __init__(self, num_slots: int, vocab_size: int, default: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty((0, vocab_size), dtype=dtype, device=device)
        self._num_slots = num_slots
        self._default = default
        self._filled = np.zeros(num_slots + 1, dtype=np.bool_)
        self._staged: dict[int, tuple[IdArray, IdArray, int]] = {}

    def stage(self, slot: int, ids: IdArray, values: IdArray, *, others: int) -> None:
        """Give a slot its row at the next flush. Ids must differ."""
        self._staged[slot] = (ids, values, others)
        self._filled[slot] = True

    def clear(self, slot: int) -> None:
        """Give a slot the default at the next flush, if it has anything else."""
        if self._filled[slot]:
            empty = np.zeros(0, dtype=np.int64)
            self._staged[slot] = (empty, empty, self._default)
            self._filled[slot] = False

    def flush(self) -> None:
        if not self._staged:
            return
        if not self.data.shape[0]:
            shape = (self._num_slots + 1, self.data.shape[1])
            self.data = torch.full(shape, self._default, dtype=self.data.dtype, device=self.data.device)
        slots = np.fromiter(self._staged, np.int64)
        ids, values, others = zip(*self._staged.values(), strict=True)
        self.data[self._upload(slots)] = self._upload(np.array(others)).to(self.data.dtype).unsqueeze(1)
        counts = [len(row) for row in ids]
        if sum(counts):
            where = (self._upload(np.repeat(slots, counts)), self._upload(np.concatenate(ids)))
            self.data[where] = self._upload(np.concatenate(values)).to(self.data.dtype)
        self._staged.clear()

    def _upload(self, array: IdArray) -> Tensor:
        return upload(array, self.data.device)
