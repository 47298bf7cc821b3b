"""CUDA graphs of decode steps, one for each of a few row counts; a step runs in the next larger one, padded with rows
of the null slot.

A size is run once as usual (kernels compile, libraries allocate), then captured; the largest at start, the others when
a step first needs them. All share one memory pool: they run one after another, in one stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class DecodeGraphs:
    """Captured graphs by size. `sizes` empty: no step has a graph."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sorted(sizes)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if sizes else None

    def size_for(self, num_rows: int) -> int | None:
        """The smallest size that holds the rows; None when none does."""
        place = bisect_left(self._sizes, num_rows)
        return self._sizes[place] if place < len(self._sizes) else None

    def run(self, size: int, forward: Callable[[], Tensor]) -> Tensor:
        """Run the size's graph; the tensor that `forward` returned when it was captured, refilled.

        `forward` must read and write the same memory whenever it is called for this size. At the first call it is run,
        then captured for the calls after.
        """
        captured = self._graphs.get(size)
        if captured is None:
            result = forward()
            self._capture(size, forward)
            return result
        graph, output = captured
        graph.replay()
        return output

    def _capture(self, size: int, forward: Callable[[], Tensor]) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = forward()
        self._graphs[size] = (graph, output)

    def close(self) -> None:
        """Free the graphs' memory."""
        self._graphs.clear()
