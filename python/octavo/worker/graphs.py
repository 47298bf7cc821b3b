"""CUDA graphs of decode steps, one for each of a few row counts and bounds of the context; a step runs in the next
larger one, padded with rows of the null slot. The bound on the context lets attention split its work for it. And
graphs of what follows, from the hidden states to the tokens, one for each row count and way of sampling.

A graph is run once as usual (kernels compile, libraries allocate), then captured; the largest at start, the others when
the engine is idle or a step first needs them. All share one memory pool: they run one after another, in one stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from octavo.worker.step_kinds import context_bounds

MAX_SAMPLING_GRAPHS = 256
"""Ways of sampling are many; steps beyond so many run as usual."""
Result = TypeVar("Result")


class DecodeGraphs:
    """Captured graphs. `sizes` empty: no step has a graph."""

    def __init__(self, sizes: Sequence[int], max_model_len: int) -> None:
        self._sizes = sorted(sizes)
        self._bounds = context_bounds(max_model_len)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._sampling: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if sizes else None

    def size_for(self, num_rows: int) -> int | None:
        """The smallest size that holds the rows; None when none does."""
        place = bisect_left(self._sizes, num_rows)
        return self._sizes[place] if place < len(self._sizes) else None

    def bound_for(self, max_kv_len: int) -> int:
        """The least bound that the step's longest context keeps."""
        return self._bounds[bisect_left(self._bounds, max_kv_len)]

    def has(self, size: int, bound: int) -> bool:
        """Whether `run` will replay a graph."""
        return (size, bound) in self._graphs

    def missing(self) -> Iterator[tuple[int, int]]:
        """(size, bound) of the graphs that are not captured yet: short contexts first, then few rows first."""
        for bound in self._bounds:
            for size in self._sizes:
                if not self.has(size, bound):
                    yield size, bound

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

    def run_sampling(self, key: Hashable, sample: Callable[[], None]) -> None:
        """Run the graph of a way of sampling. `sample` must do the same to the same memory whenever it is called for
        this key. At the first call it is run, then captured for the calls after."""
        graph = self._sampling.get(key)
        if graph is not None:
            graph.replay()
            return
        sample()
        if len(self._sampling) < MAX_SAMPLING_GRAPHS:
            self._sampling[key], _ = self._capture(sample)

    def _capture(self, forward: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = forward()
        return graph, output

    def close(self) -> None:
        """Free the graphs' memory."""
        self._graphs.clear()
        self._sampling.clear()
