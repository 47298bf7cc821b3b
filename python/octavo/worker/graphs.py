"""CUDA graphs of decode steps, one for each of a few row counts and bounds of the context; a step runs in the next
larger one, padded with rows of the null slot. The bound on the context lets attention split its work for it.

A graph is run once as usual (kernels compile, libraries allocate), then captured; the largest at start, the others when
a step first needs them. All share one memory pool: they run one after another, in one stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CONTEXT_BOUNDS = (256, 4096)
"""Beside the longest context."""


class DecodeGraphs:
    """Captured graphs. `sizes` empty: no step has a graph."""

    def __init__(self, sizes: Sequence[int], max_model_len: int) -> None:
        self._sizes = sorted(sizes)
        self._bounds = [bound for bound in CONTEXT_BOUNDS if bound < max_model_len] + [max_model_len]
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if sizes else None

    def size_for(self, num_rows: int) -> int | None:
        """The smallest size that holds the rows; None when none does."""
        place = bisect_left(self._sizes, num_rows)
        return self._sizes[place] if place < len(self._sizes) else None

    def bound_for(self, max_kv_len: int) -> int:
        """The least bound that the step's longest context keeps."""
        return self._bounds[bisect_left(self._bounds, max_kv_len)]

    def run(self, size: int, bound: int, forward: Callable[[], Tensor]) -> Tensor:
        """Run a graph; the tensor that `forward` returned when it was captured, refilled.

        `forward` must read and write the same memory whenever it is called for this size and bound. At the first call
        it is run, then captured for the calls after.
        """
        captured = self._graphs.get((size, bound))
        if captured is None:
            result = forward()
            self._graphs[size, bound] = self._capture(forward)
            return result
        graph, output = captured
        graph.replay()
        return output

    def _capture(self, forward: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = forward()
        return graph, output

    def close(self) -> None:
        """Free the graphs' memory."""
        self._graphs.clear()
