"""CUDA graphs of decode steps, one for each of a few row counts and bounds of the context; a step runs in the next
larger one, padded with rows of the null slot. The bound on the context lets attention split its work for it. And
graphs of what follows, from the hidden states to the tokens, one for each row count and way of sampling.

A graph is run once as usual (libraries allocate), then captured; the largest at start, the others when the engine is
idle or steps need them again and again: until then a step runs in a larger graph that is there. All share one memory
pool: they run one after another, in one stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from octavo.worker.step_kinds import context_bounds

PATIENCE = 2
"""A step is captured when its like comes for the so-manieth time: a capture takes as long as several decode steps."""
MAX_SAMPLING_GRAPHS = 256
"""Ways of sampling are many; steps beyond so many run as usual."""
Result = TypeVar("Result")


class DecodeGraphs:
    """Captured graphs. `sizes` empty: no step has a graph."""

    def __init__(self, sizes: Sequence[int], max_model_len: int) -> None:
        self._sizes = sorted(sizes)
        self._bounds = context_bounds(max_model_len)
        self._graphs: dict[tuple[int, int], Callable[[], Tensor]] = {}
        self._sampling: dict[Hashable, Callable[[], None]] = {}
        self._wanted: Counter[Hashable] = Counter()
        self._pool = torch.cuda.graph_pool_handle() if sizes else None
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream() if sizes else None  # type: ignore[no-untyped-call]

    @property
    def largest(self) -> int | None:
        """The largest size; None where no step has a graph."""
        return self._sizes[-1] if self._sizes else None

    def size_for(self, num_rows: int) -> int | None:
        """The smallest size that holds the rows; None when none does."""
        place = bisect_left(self._sizes, num_rows)
        return self._sizes[place] if place < len(self._sizes) else None

    def bound_for(self, max_kv_len: int) -> int:
        """The least bound that the step's longest context keeps."""
        return self._bounds[bisect_left(self._bounds, max_kv_len)]

    def choose(self, num_rows: int, max_kv_len: int) -> tuple[int, int] | None:
        """(size, bound) of the graph that a step runs in: the least that fits, unless it is not captured, not often
        wanted, and another one that fits is captured. None when there are more rows than any size."""
        size = self.size_for(num_rows)
        if size is None:
            return None
        best = size, self.bound_for(max_kv_len)
        if self.has(*best):
            return best
        if self.wants(best):
            return best
        return min((key for key in self._graphs if key[0] >= best[0] and key[1] >= best[1]), default=best)

    def wants(self, key: Hashable) -> bool:
        """Count a wish for a graph; whether there were enough."""
        self._wanted[key] += 1
        return self._wanted[key] >= PATIENCE

    def has(self, size: int, bound: int) -> bool:
        """Whether `run` will replay a graph."""
        return (size, bound) in self._graphs

    def missing(self) -> Iterator[tuple[int, int]]:
        """(size, bound) of the graphs that are not captured yet: few rows first, and first for contexts of middling
        length, whose graphs serve for shorter ones too."""
        first = self._bounds[min(1, len(self._bounds) - 1)]
        for bound in sorted(self._bounds, key=lambda bound: (bound != first, bound)):
            for size in self._sizes:
                if not self.has(size, bound):
                    yield size, bound

    def run(self, size: int, bound: int, forward: Callable[[], Tensor]) -> Tensor:
        """Run a graph; the tensor that `forward` returned when it was captured, refilled.

        `forward` must read and write the same memory whenever it is called for this size and bound. At the first call
        it is run, then captured for the calls after.
        """
        replay = self._graphs.get((size, bound))
        if replay is not None:
            return replay()
        result = forward()
        self._graphs[size, bound] = self.capture(forward)
        return result

    def run_sampling(self, key: Hashable, sample: Callable[[], None]) -> None:
        """Run the graph of a way of sampling. `sample` must do the same to the same memory whenever it is called for
        this key. It is run as it is until the key has come often enough to be captured."""
        replay = self._sampling.get(key)
        if replay is not None:
            replay()
            return
        sample()
        if self.wants(key) and len(self._sampling) < MAX_SAMPLING_GRAPHS:
            self._sampling[key] = self.capture(sample)

    def capture(self, forward: Callable[[], Result]) -> Callable[[], Result]:
        """What replays `forward` and gives what it gave, refilled. Unlike `torch.cuda.graph`, this neither waits for
        the device nor collects garbage: steps are in flight."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = forward()
            finally:
                graph.capture_end()

        def replay() -> Result:
            graph.replay()
            return output

        return replay

    @property
    def num_captured(self) -> int:
        return len(self._graphs) + len(self._sampling)

    def close(self) -> None:
        """Free the graphs' memory."""
        self._graphs.clear()
        self._sampling.clear()
