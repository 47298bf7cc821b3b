"""The sampling seam: what a feature is told at admission and in a step, and what it must do.

A feature (one file each here) owns its per-slot state on the device and changes logits in place. The order of features
is sampler.py's business, when a slot is free is the scheduler's.

Shape suffixes: s sampled rows of the step, v vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

if TYPE_CHECKING:
    from octavo._core import NewRow

MASKED = -1e30
"""Logit of a token that a feature forbids. Finite: when everything is forbidden, something allowed is still chosen; and
far enough from the border of float32 that penalties and temperatures (at least `MIN_TEMPERATURE`) can't cross it."""

MIN_TEMPERATURE = 1e-5
"""Below it a distribution over float32 logits is a single token: treated as 0, greedy."""

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AdmittedRow:
    """A sequence that got its slot: wire parameters (fields that differ from `SamplingParams`' defaults, and what the
    engine resolved: seed, first_choice, bad_words_ids, eos_token_ids, stop_token_ids) and the tokens it has."""

    slot: int
    index: int
    params: Mapping[str, Any]
    prompt_ids: IntArray
    output_ids: IntArray
    """Generated before a preemption; else empty."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def temperature(self) -> float:
        return float(self.params.get("temperature", 1.0))

    @property
    def is_random(self) -> bool:
        """Whether the row's tokens are drawn; else they are the most probable ones."""
        return self.temperature >= MIN_TEMPERATURE

    @classmethod
    def from_new_row(cls, row: NewRow) -> AdmittedRow:
        token_ids = np.frombuffer(row.token_ids, dtype="<i4")
        prompt_ids, output_ids = token_ids[: row.num_prompt_tokens], token_ids[row.num_prompt_tokens :]
        return cls(row.slot, row.index, json.loads(row.params), prompt_ids, output_ids)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a step that get a token now."""

    slot_s: Tensor
    """int64, on the device (features see no other type). Slots differ, but for padding rows."""
    position_s: Tensor
    """int64, on the device: the position that the new token takes in its sequence."""
    host_slots: IntArray
    """The same slots, or those of more rows and without padding, for decisions on the host."""

    def widened(self) -> SampledRows:
        """The same rows in int64."""
        return SampledRows(self.slot_s.long(), self.position_s.long(), self.host_slots)


@dataclass(frozen=True, slots=True)
class TokenTarget:
    """Where new tokens go, on the device."""

    last_token_s: Tensor
    """int32, one a slot: for a next step that is planned before the host knows them."""
    output_s: Tensor
    """int32, one a row: on its way to the host."""


class Feature(Protocol):
    """One property of how tokens are chosen."""

    def admit(self, row: AdmittedRow) -> bool:
        """Stage the slot's state on the host, over whatever the slot held. Whether the row uses the feature: no batch
        without such a row is applied to or observed."""

    def flush(self) -> None:
        """Bring what was staged to the device, without waiting for it."""

    def apply(self, logits_sv: Tensor, rows: SampledRows) -> None:
        """Change logits in place; rows that don't use the feature keep theirs to the bit."""


class Adjuster(Feature, Protocol):
    """A feature that comes before the temperature, whatever follows."""

    def capture_key(self, host_slots: IntArray) -> Hashable | None:
        """Whatever `apply` depends on for these slots beside the contents of tensors: as long as it stays the same, a
        captured `apply` (and `observe`) can be replayed. None: can't be captured."""


@runtime_checkable
class Observer(Protocol):
    """A feature whose state follows the tokens chosen."""

    def observe(self, rows: SampledRows, token_s: Tensor) -> None:
        """Take note of the new tokens."""
