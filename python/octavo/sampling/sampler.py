"""Chooses the tokens of a step: raw logprobs, then the features in their order, then greedy or a draw.

A feature that no row of the batch uses is skipped. Which ones are used is a bit mask per slot on the host, set at
admission, so that a step decides without asking the device. NaN logits count as -inf: such a token is not chosen unless
its whole row is NaN or masked by the model, when the result is the lowest allowed id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.allowed import AllowedTokens
from octavo.sampling.bad_words import BadWords
from octavo.sampling.base import AdmittedRow, Feature, Observer, SampledRows
from octavo.sampling.bias import LogitBias
from octavo.sampling.draw import draw, greedy, num_uniforms
from octavo.sampling.logprobs import TokenLogprobs, gather_logprobs, raw_logprobs
from octavo.sampling.min_p import MinP
from octavo.sampling.min_tokens import MinTokens
from octavo.sampling.penalties import Penalties
from octavo.sampling.seed import Seeds
from octavo.sampling.temperature import Temperature
from octavo.sampling.top_k_top_p import TopKTopP

if TYPE_CHECKING:
    from octavo._core import NewRow

RANDOM = 1 << 30
GREEDY = 1 << 29
"""Bits of a slot's mask beside the features' (bit i: feature i)."""


def clean(logits_sv: Tensor) -> Tensor:
    """NaN becomes -inf, +inf a large number; in place."""
    return logits_sv.nan_to_num_(nan=-torch.inf, posinf=1e30, neginf=-torch.inf)


@dataclass(frozen=True, slots=True)
class Sampled:
    token_s: Tensor
    """int64"""
    logprobs: TokenLogprobs | None
    """None when no row asked."""


class Sampler:
    """Features, in order, over `num_slots` slots and the null slot after them."""

    def __init__(self, *, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._temperature = Temperature(num_slots, device)
        self._seeds = Seeds(num_slots, device)
        self._features: tuple[Feature, ...] = (
            AllowedTokens(num_slots, vocab_size, device),
            BadWords(num_slots, vocab_size, device),
            MinTokens(num_slots, vocab_size, device),
            LogitBias(num_slots, device),
            Penalties(num_slots, vocab_size, device),
            self._temperature,
            TopKTopP(num_slots, device),
            MinP(num_slots, device),
        )
        self._used = np.full(num_slots + 1, GREEDY, dtype=np.int32)
        self._num_logprobs = np.full(num_slots + 1, -1, dtype=np.int32)

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

    def sample(self, logits_sv: Tensor, rows: SampledRows) -> Sampled:
        """Choose one token a row. `logits_sv` (float32) is used up."""
        used = int(np.bitwise_or.reduce(self._used[rows.host_slots]))
        num_logprobs = int(self._num_logprobs[rows.host_slots].max())
        logprob_sv = raw_logprobs(clean(logits_sv)) if num_logprobs >= 0 else None
        features = [feature for i, feature in enumerate(self._features) if used >> i & 1]
        if logprob_sv is None:
            clean(logits_sv)
        for feature in features:
            feature.apply(logits_sv, rows)
        token_s = self._choose(logits_sv, rows, used)
        for feature in features:
            if isinstance(feature, Observer):
                feature.observe(rows, token_s)
        logprobs = None if logprob_sv is None else gather_logprobs(logprob_sv, token_s, num_logprobs)
        return Sampled(token_s, logprobs)

    def _choose(self, logits_sv: Tensor, rows: SampledRows, used: int) -> Tensor:
        if not used & RANDOM:
            return greedy(logits_sv)
        drawn_s = draw(logits_sv, self._seeds.uniform_su(rows, num_uniforms(logits_sv.shape[1])))
        if not used & GREEDY:
            return drawn_s
        return torch.where(self._temperature.random_s(rows), drawn_s, greedy(logits_sv))
