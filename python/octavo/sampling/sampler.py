"""Chooses the tokens of a step: raw logprobs, then the features in their order, then greedy or a draw. Kernels do what
follows the adjustments of logits where there are some (fused.py); the torch code here is their reference.

A feature that no row of the batch uses is skipped. Which ones are used is a bit mask per slot on the host, set at
admission, so that a step decides without asking the device. NaN logits count as -inf: such a token is not chosen unless
its whole row is NaN or masked by the model, when the result is the lowest allowed id.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.allowed import AllowedTokens
from octavo.sampling.bad_words import BadWords
from octavo.sampling.base import Adjuster, AdmittedRow, Feature, IntArray, Observer, SampledRows, TokenTarget
from octavo.sampling.bias import LogitBias
from octavo.sampling.draw import draw, greedy, num_uniforms
from octavo.sampling.grammar import GrammarMasks
from octavo.sampling.logprobs import TokenLogprobs, gather_logprobs, raw_logprobs
from octavo.sampling.min_p import MinP
from octavo.sampling.min_tokens import MinTokens
from octavo.sampling.penalties import Penalties
from octavo.sampling.seed import Seeds
from octavo.sampling.temperature import Temperature
from octavo.sampling.top_k_top_p import TopKTopP

if TYPE_CHECKING:
    from octavo._core import NewRow
    from octavo.sampling.fused import FusedChoice

RANDOM = 1 << 30
GREEDY = 1 << 29
"""Bits of a slot's mask beside the features' (bit i: feature i)."""
FEATURES = GREEDY - 1


def clean(logits_sv: Tensor) -> Tensor:
    """NaN becomes -inf, +inf a large number; in place."""
    return logits_sv.nan_to_num_(nan=-torch.inf, posinf=1e30, neginf=-torch.inf)


@dataclass(frozen=True, slots=True)
class Sampled:
    token_s: Tensor
    """int64"""
    logprobs: TokenLogprobs | None
    """None when no row asked."""


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """What the rows of a batch ask for, decided on the host. Equal plans do the same work."""

    used: int
    """The rows' masks of features, together."""
    num_logprobs: int
    """-1 for none."""
    capture_key: tuple[Hashable, ...] | None
    """As `Adjuster.capture_key`, of all that are used; None when the work can't be captured."""


class Sampler:
    """Features, in order, over `num_slots` slots and the null slot after them. With `max_fused_rows`, batches (of up to
    so many rows) are finished by kernels."""

    def __init__(self, *, vocab_size: int, num_slots: int, device: torch.device, max_fused_rows: int = 0) -> None:
        self._temperature = Temperature(num_slots, device)
        self._top_k_top_p = TopKTopP(num_slots, device)
        self._min_p = MinP(num_slots, device)
        self._seeds = Seeds(num_slots, device)
        self.masks = GrammarMasks(num_slots, vocab_size, device, fused=max_fused_rows > 0)
        self._adjusters: tuple[Adjuster, ...] = (
            self.masks,
            AllowedTokens(num_slots, vocab_size, device),
            BadWords(num_slots, vocab_size, device),
            MinTokens(num_slots, vocab_size, device),
            LogitBias(num_slots, device),
            Penalties(num_slots, vocab_size, device, fused=max_fused_rows > 0),
        )
        self._features: tuple[Feature, ...] = (*self._adjusters, self._temperature, self._top_k_top_p, self._min_p)
        self._used = np.full(num_slots + 1, GREEDY, dtype=np.int32)
        self._num_logprobs = np.full(num_slots + 1, -1, dtype=np.int32)
        self._fused = self._make_fused(max_fused_rows, vocab_size) if max_fused_rows else None

    def _make_fused(self, max_rows: int, vocab_size: int) -> FusedChoice:
        from octavo.kernels.reference.sample import SlotParameters
        from octavo.sampling.fused import FusedChoice  # loads Triton

        slots = SlotParameters(
            self._temperature.divisor,
            self._temperature.random,
            *self._top_k_top_p.limits,
            self._min_p.log,
            *self._seeds.keys,
        )
        return FusedChoice(slots, max_rows, vocab_size)

    def warm_up(self, *, limits: bool) -> None:
        """Compile what would else be compiled at its first use: what limited tokens (top-k, …) take, or the rest."""
        if self._fused is not None:
            self._fused.warm_up(limits=limits)

    def admit(self, new_rows: Iterable[NewRow]) -> None:
        """Take over the parameters of sequences that got slots in this step."""
        for new_row in new_rows:
            row = AdmittedRow.from_new_row(new_row)
            used = RANDOM if row.is_random else GREEDY
            for i, feature in enumerate(self._features):
                used |= feature.admit(row) << i
            self._used[row.slot] = used
            self._num_logprobs[row.slot] = row.params.get("logprobs", -1)
            self._seeds.admit(row)
        self._seeds.flush()
        for feature in self._features:
            feature.flush()

    def plan(self, host_slots: IntArray) -> SamplePlan:
        """What sampling these slots takes."""
        used = int(np.bitwise_or.reduce(self._used[host_slots]))
        keys = tuple(feature.capture_key(host_slots) for i, feature in enumerate(self._adjusters) if used >> i & 1)
        num_logprobs = int(self._num_logprobs[host_slots].max())
        if self._fused is None or None in keys:
            return SamplePlan(used, num_logprobs, None)
        return SamplePlan(self._as_kernels_see(used), num_logprobs, keys)

    def _as_kernels_see(self, used: int) -> int:
        """The mask, without what makes no difference to the kernels: one bit for all limits, RANDOM for any draw."""
        first = len(self._adjusters)
        limits = 1 << first + 1 if (used & FEATURES) >> first + 1 else 0
        return used & ((1 << first) - 1 | RANDOM) | limits

    def usual_plans(self) -> list[SamplePlan]:
        """What most batches ask for: greedy, draws, draws from limited tokens. Empty where nothing is captured."""
        if self._fused is None:
            return []
        limits = 1 << len(self._adjusters) + 1
        return [SamplePlan(used, -1, ()) for used in (0, RANDOM, RANDOM | limits)]

    def sample(self, logits_sv: Tensor, rows: SampledRows, plan: SamplePlan, target: TokenTarget) -> Sampled:
        """Choose one token a row, by a plan for these rows or for more; it goes where `target` says, too. `logits_sv`
        (float32) is used up. What is returned is valid until the next call."""
        adjusters = [feature for i, feature in enumerate(self._adjusters) if plan.used >> i & 1]
        wide = rows
        if adjusters or plan.num_logprobs >= 0 or self._fused is None:  # the kernels clean what they read
            clean(logits_sv)
            wide = rows.widened()
        logprob_sv = raw_logprobs(logits_sv) if plan.num_logprobs >= 0 else None
        for feature in adjusters:
            feature.apply(logits_sv, wide)
        token_s = self._choose(logits_sv, wide, plan.used, target)
        for feature in adjusters:
            if isinstance(feature, Observer):
                feature.observe(wide, token_s)
        logprobs = None if logprob_sv is None else gather_logprobs(logprob_sv, token_s, plan.num_logprobs)
        return Sampled(token_s, logprobs)

    def _choose(self, logits_sv: Tensor, rows: SampledRows, used: int, target: TokenTarget) -> Tensor:
        first = len(self._adjusters)
        if self._fused is not None:
            return self._fused.choose(
                logits_sv, rows, target, draws=bool(used & RANDOM), limits=bool((used & FEATURES) >> first + 1)
            )
        for i, feature in enumerate(self._features[first:], start=first):
            if used >> i & 1:
                feature.apply(logits_sv, rows)
        token_s = self._pick(logits_sv, rows, used)
        target.last_token_s[rows.slot_s] = token_s.int()
        target.output_s.copy_(token_s)
        return token_s

    def _pick(self, logits_sv: Tensor, rows: SampledRows, used: int) -> Tensor:
        if not used & RANDOM:
            return greedy(logits_sv)
        drawn_s = draw(logits_sv, self._seeds.uniform_su(rows, num_uniforms(logits_sv.shape[1])))
        if not used & GREEDY:
            return drawn_s
        return torch.where(self._temperature.random_s(rows), drawn_s, greedy(logits_sv))
