"""CUDA graphs of decode steps whose rows begin with the same blocks and read those together (shared_attention.py).

They run what `DecodeGraphs` run, and some kernels more: worth their while where the control plane has found enough to
share. Until such a graph is captured, a plain one serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from octavo.worker.kind_graphs import Captures, KindGraphs
from octavo.worker.step_kinds import StepKind, together_kinds

if TYPE_CHECKING:
    from octavo._core import StepPlan


class TogetherGraphs(KindGraphs):
    """Graphs for steps of the given row counts; `sizes` empty: there are none."""

    def __init__(self, captures: Captures, sizes: Sequence[int], max_model_len: int) -> None:
        super().__init__(captures)
        self._kinds = together_kinds(sizes, max_model_len)

    def choose(self, plan: StepPlan) -> StepKind | None:
        """The least kind that holds a step of decode rows that share blocks, if it is captured, or wanted often enough
        to be."""
        for kind in self._kinds:
            if plan.num_rows <= kind.num_rows and plan.max_kv_len <= kind.max_kv_len:
                return kind if self.has(kind) or self._captures.wants(kind) else None
        return None

    def missing(self) -> Iterator[StepKind]:
        """What is not captured yet: short contexts first, then few rows first."""
        for kind in self._kinds:
            if not self.has(kind):
                yield kind
