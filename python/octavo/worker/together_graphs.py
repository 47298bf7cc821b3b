"""CUDA graphs of decode steps whose rows begin with the same blocks and read those together (shared_attention.py).

They run what `DecodeGraphs` run, and some kernels more: worth their while where the control plane has found enough to
share. Until such a graph is captured, a plain one serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from octavo.worker.mixed_graphs import Captures
from octavo.worker.step_kinds import StepKind, together_kinds

if TYPE_CHECKING:
    from octavo._core import StepPlan


class TogetherGraphs:
    """Graphs for steps of the given row counts; `sizes` empty: there are none."""

    def __init__(self, captures: Captures, sizes: Sequence[int], max_model_len: int) -> None:
        self._captures = captures
        self._kinds = together_kinds(sizes, max_model_len)
        self._graphs: dict[StepKind, Callable[[], Tensor]] = {}

    def choose(self, plan: StepPlan) -> StepKind | None:
        """The least kind that holds a step of decode rows that share blocks, if it is captured, or wanted often enough
        to be."""
        for kind in self._kinds:
            if plan.num_rows <= kind.num_rows and plan.max_kv_len <= kind.max_kv_len:
                return kind if self.has(kind) or self._captures.wants(kind) else None
        return None

    def has(self, kind: StepKind) -> bool:
        """Whether `run` will replay a graph."""
        return kind in self._graphs

    def missing(self) -> Iterator[StepKind]:
        """What is not captured yet: short contexts first, then few rows first."""
        for kind in self._kinds:
            if not self.has(kind):
                yield kind

    def run(self, kind: StepKind, forward: Callable[[], Tensor]) -> Tensor:
        """As `DecodeGraphs.run`."""
        replay = self._graphs.get(kind)
        if replay is not None:
            return replay()
        result = forward()
        self._graphs[kind] = self._captures.capture(forward)
        return result

    def close(self) -> None:
        """Free the graphs' memory."""
        self._graphs.clear()
