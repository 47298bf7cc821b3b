"""CUDA graphs by kind of step: what those of steps with prompts and those of rows that share blocks have in common.
Which kind a step takes is theirs to say.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from torch import Tensor

from octavo.worker.step_kinds import StepKind


class Captures(Protocol):
    """See `DecodeGraphs`."""

    def wants(self, key: Hashable) -> bool: ...

    def capture(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]: ...


class KindGraphs:
    """At most one graph a kind."""

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._graphs: dict[StepKind, Callable[[], Tensor]] = {}

    def has(self, kind: StepKind) -> bool:
        """Whether `run` will replay a graph."""
        return kind in self._graphs

    def run(self, kind: StepKind, forward: Callable[[], Tensor]) -> Tensor:
        """As `DecodeGraphs.run`."""
        replay = self._graphs.get(kind)
        if replay is not None:
            return replay()
        result = forward()
        self._graphs[kind] = self._captures.capture(forward)
        return result

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def close(self) -> None:
        """Free the graphs' memory."""
        self._graphs.clear()
