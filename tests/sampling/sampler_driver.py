"""Sequences in slots of a Sampler, stepped with logits of the test's choice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.base import SampledRows, TokenTarget
from octavo.sampling.sampler import Sampled, Sampler

VOCAB_SIZE = 37


@dataclass
class Row:
    slot: int
    params: dict[str, Any]
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)
    index: int = 0


@dataclass
class WireRow:
    """As `octavo._core.NewRow`."""

    slot: int
    params: bytes
    index: int
    token_ids: bytes
    num_prompt_tokens: int


def make_sampler(num_slots: int = 8, vocab_size: int = VOCAB_SIZE) -> Sampler:
    return Sampler(vocab_size=vocab_size, num_slots=num_slots, device=torch.device("cpu"))


def admit(sampler: Sampler, rows: Sequence[Row]) -> None:
    sampler.admit(
        WireRow(
            row.slot,
            json.dumps(row.params).encode(),
            row.index,
            np.array([*row.prompt, *row.output], dtype="<i4").tobytes(),
            len(row.prompt),
        )
        for row in rows
    )


def rows_of(rows: Sequence[Row]) -> SampledRows:
    slots = np.array([row.slot for row in rows], dtype=np.int32)
    positions = torch.tensor([len(row.prompt) + len(row.output) for row in rows])
    return SampledRows(torch.from_numpy(slots).long(), positions, slots)


def sample(sampler: Sampler, logits_sv: Tensor, rows: SampledRows) -> Sampled:
    """Sample rows into tensors of their own, which must say the same as what is returned."""
    device = logits_sv.device
    num_slots = int(max(rows.host_slots)) + 1
    target = TokenTarget(
        torch.zeros(num_slots, dtype=torch.int32, device=device),
        torch.zeros(len(rows.host_slots), dtype=torch.int32, device=device),
    )
    sampled = sampler.sample(logits_sv, rows, sampler.plan(rows.host_slots), target)
    if device.type != "meta":
        assert target.output_s.equal(sampled.token_s.int())
        assert target.last_token_s[rows.slot_s.long()].equal(sampled.token_s.int())
    return sampled


def step(sampler: Sampler, rows: Sequence[Row], logits: Tensor) -> Sampled:
    """Sample a token for each row from its logits and append it to the row's output."""
    sampled = sample(sampler, logits.clone(), rows_of(rows))
    for row, token in zip(rows, sampled.token_s.tolist(), strict=True):
        row.output.append(token)
    return sampled
