"""CUDA graphs of small steps with prompts. Launching such a step's kernels one by one takes the host longer than the
device runs them, and those who decode beside the prompts wait for it.

A graph has bounds only: so many tokens, rows, and decode rows among them at most. A step's own counts are read on the
device, from the arena's header; what is left of the bounds is rows without tokens and tokens without a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from octavo.worker.kind_graphs import Captures, KindGraphs
from octavo.worker.step_kinds import MAX_MIXED_GRAPHS, StepKind, graph_kinds

if TYPE_CHECKING:
    from octavo._core import StepPlan


class MixedGraphs(KindGraphs):
    """Graphs for steps of up to `max_tokens` tokens and the largest of `row_sizes` rows; none if either is missing."""

    def __init__(self, captures: Captures, row_sizes: Sequence[int], max_tokens: int, max_model_len: int) -> None:
        super().__init__(captures)
        self._kinds = graph_kinds(row_sizes, max_tokens, max_model_len)

    def choose(self, plan: StepPlan) -> StepKind | None:
        """The least kind that holds a step, if it is captured, or wanted often enough to be."""
        if plan.prompt_logprob_rows:
            return None
        prompts = plan.num_rows - plan.num_decode_rows
        for kind in self._kinds:
            fits = plan.num_decode_rows <= kind.num_decode_rows and prompts <= kind.num_rows - kind.num_decode_rows
            if fits and plan.num_tokens <= kind.num_tokens:
                return kind if kind in self._graphs or self._is_wanted(kind) else None
        return None

    def _is_wanted(self, kind: StepKind) -> bool:
        return len(self._graphs) < MAX_MIXED_GRAPHS and self._captures.wants(kind)

    def missing(self) -> Iterator[StepKind]:
        """What is not captured yet, few rows first."""
        for kind in self._kinds:
            if kind not in self._graphs and len(self._graphs) < MAX_MIXED_GRAPHS:
                yield kind
