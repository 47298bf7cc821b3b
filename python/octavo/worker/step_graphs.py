"""The graphs of a runner, of every kind of step; none is captured yet when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.worker.graphs import DecodeGraphs
from octavo.worker.mixed_graphs import MixedGraphs
from octavo.worker.together_graphs import TogetherGraphs


@dataclass(slots=True)
class StepGraphs:
    """A step takes the first of these that holds it."""

    together: TogetherGraphs
    """Decode rows that begin with the same blocks."""
    decode: DecodeGraphs
    mixed: MixedGraphs
    """Prompts among the rows."""

    @classmethod
    def make(
        cls, row_sizes: Sequence[int], *, prompt_tokens: int, max_model_len: int, reads_together: bool
    ) -> StepGraphs:
        """For up to so many rows, tokens of steps with prompts, and positions of a context. No sizes: no graphs."""
        decode = DecodeGraphs(row_sizes, max_model_len)
        return cls(
            together=TogetherGraphs(decode, row_sizes if reads_together else [], max_model_len),
            decode=decode,
            mixed=MixedGraphs(decode, row_sizes, prompt_tokens, max_model_len),
        )

    @property
    def num_captured(self) -> int:
        return self.together.num_captured + self.decode.num_captured + self.mixed.num_captured

    def close(self) -> None:
        """Free the graphs' memory."""
        self.together.close()
        self.mixed.close()
        self.decode.close()
