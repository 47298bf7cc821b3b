"""Answers for classes that look at values while they run on tensors without any: which experts are chosen, which masks
are set, how long something is. What is asked for exists then, as often as it can at most, and numbers are 0.

For watching alone (transformers_watch.py): results mean nothing, and what stands behind a condition may stay unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def _nonzero(x: Tensor) -> Tensor:
    return x.new_zeros((x.numel(), x.dim()), dtype=torch.int64)


def _scalar(x: Tensor) -> bool | int | float:
    return False if x.dtype == torch.bool else 0.0 if x.is_floating_point() else 0


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Masks choose everything."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            places.append(index)
        else:
            places += [index.new_zeros(index.numel(), dtype=torch.int64)] * index.dim()
    return aten.index.Tensor(x, places)


def _split(x: Tensor, sizes: Sequence[int], dim: int = 0) -> Any:
    """The last part has what the others leave: sizes are numbers of ours."""
    return aten.split_with_sizes.default(x, [*sizes[:-1], x.shape[dim] - sum(sizes[:-1])], dim)


ANSWERS: Mapping[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten._local_scalar_dense.default: _scalar,
    aten.index.Tensor: _index,
    aten.split_with_sizes.default: _split,
}
"""Operation -> what stands for its result."""


class Guesses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within a `FakeTensorMode`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What Torch calls for each operation."""
        return ANSWERS.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def without_values() -> Iterator[None]:
    """Tensors that are made inside have no values, and none is missed."""
    with FakeTensorMode(allow_non_fake_inputs=True), Guesses():
        yield
