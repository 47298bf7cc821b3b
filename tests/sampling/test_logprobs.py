"""Logprobs: raw, exact for the chosen token, in a stable order; one row or many, sampled or given."""

from __future__ import annotations

import math

import pytest
import torch
from sampler_driver import Row, admit, make_sampler, step

from octavo.sampling.logprobs import gather_logprobs, raw_logprobs, top_tokens
from octavo.sampling.prompt_logprobs import prompt_logprobs


def test_top_tokens_are_in_stable_order() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-4, 4, (50, 300), generator=generator) / 4  # many ties, zeros and negatives
    values[7, :] = -math.inf
    values[8, 3] = -0.0
    for row in range(50):
        expected = sorted(range(300), key=lambda i, row=row: (-float(values[row, i]), i))[:20]
        assert top_tokens(values[row : row + 1], 20)[0].tolist() == expected
    assert top_tokens(values, 300).sort(1).values.equal(torch.arange(300).expand(50, -1))


def test_raw_logprobs_are_those_of_float64() -> None:
    logits = torch.randn(20, 5000, generator=torch.Generator().manual_seed(3)) * 5
    logits[3, 100:] = -math.inf
    expected = logits.double().log_softmax(1)
    assert torch.allclose(raw_logprobs(logits.clone()).double(), expected, atol=2e-5)
    assert (raw_logprobs(torch.full((1, 9), -math.inf)) == -math.inf).all()


def test_ranks_count_better_tokens() -> None:
    values = torch.tensor([[-1.0, -2.0, -1.0, -3.0]])
    for token, rank in [(0, 1), (2, 1), (1, 3), (3, 4)]:
        assert gather_logprobs(values, torch.tensor([token]), 0).rank_s.tolist() == [rank]


def test_logprobs_ignore_features_and_rows_that_did_not_ask() -> None:
    sampler = make_sampler(vocab_size=50)
    rows = [
        Row(0, {"temperature": 0.0}),
        Row(1, {"seed": 1, "logprobs": 4, "temperature": 0.1, "top_k": 1, "logit_bias": {"9": 50.0}}),
        Row(2, {"seed": 2, "logprobs": 0, "allowed_token_ids": [3]}),
    ]
    admit(sampler, rows)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5))
    sampled = step(sampler, rows, logits)
    expected = logits.log_softmax(1)
    assert sampled.token_s.tolist()[1:] == [9, 3]
    assert sampled.logprobs is not None
    assert sampled.logprobs.id_sk.shape == (3, 5)
    for row in (1, 2):
        ids, values = sampled.logprobs.id_sk[row].tolist(), sampled.logprobs.value_sk[row].tolist()
        assert ids == [int(sampled.token_s[row]), *expected[row].topk(4).indices.tolist()]
        assert values == pytest.approx(expected[row][ids].tolist(), abs=1e-6)
    assert step(sampler, rows[:1], logits[:1]).logprobs is None


def test_prompt_logprobs_are_the_same_in_any_chunks() -> None:
    generator = torch.Generator().manual_seed(6)
    hidden, weight = torch.randn(23, 8, generator=generator), torch.randn(60, 8, generator=generator)
    targets = torch.randint(0, 60, (23,), generator=generator)
    largest = 0

    def logits(hidden_cm: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, hidden_cm.shape[0])
        return hidden_cm @ weight.T

    whole = prompt_logprobs(hidden, targets, 3, logits, chunk=23)
    expected = (hidden @ weight.T).log_softmax(1)
    assert whole.value_sk[:, 0].tolist() == pytest.approx(expected[torch.arange(23), targets].tolist(), abs=1e-5)
    largest = 0
    parts = prompt_logprobs(hidden, targets, 3, logits, chunk=5)
    assert largest == 5
    assert whole.id_sk.equal(parts.id_sk)
    assert whole.rank_s.equal(parts.rank_s)
    assert torch.allclose(whole.value_sk, parts.value_sk, atol=1e-5)
