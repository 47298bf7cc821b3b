"""The sampler finished by kernels (in Triton's interpreter) against the sampler in torch: same tokens, same state, same
logprobs. Run by test_fused_sampler.py in a process of its own: TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from sampler_driver import VOCAB_SIZE, Row, admit, make_sampler, rows_of, sample, step
from test_features import CASES, OUTPUT, PROMPT, random_logits, random_row

from octavo.sampling.sampler import Sampler


def make_fused(num_slots: int = 8, vocab_size: int = VOCAB_SIZE, max_rows: int = 64) -> Sampler:
    return Sampler(vocab_size=vocab_size, num_slots=num_slots, device=torch.device("cpu"), max_fused_rows=max_rows)


@pytest.mark.parametrize("logprobs", [None, 3])
def test_every_feature_gives_the_same_tokens(logprobs: int | None) -> None:
    samplers = make_sampler(num_slots=len(CASES)), make_fused(len(CASES))
    rows = [
        Row(slot, params | {"seed": slot} | ({"logprobs": logprobs} if logprobs else {}), PROMPT, OUTPUT)
        for slot, params in enumerate(CASES.values())
    ]
    logits = random_logits(len(rows), seed=2)
    logits[3, 5], logits[4, 6] = torch.nan, torch.inf
    for sampler in samplers:
        admit(sampler, rows)
    want, got = (sample(sampler, logits.clone(), rows_of(rows)) for sampler in samplers)
    assert got.token_s.tolist() == want.token_s.tolist()
    if logprobs:
        assert got.logprobs is not None
        assert want.logprobs is not None
        assert all(mine.equal(theirs) for mine, theirs in zip(got.logprobs, want.logprobs, strict=True))


def test_state_follows_the_tokens() -> None:
    """As test_features does it, but drawn, and both samplers side by side."""
    rng = random.Random(5)
    plain, fused = make_sampler(num_slots=6), make_fused(6)
    live: dict[int, Row] = {}
    for number in range(25):
        for slot in rng.sample(range(6), 2):
            if slot not in live or rng.random() < 0.3:
                live[slot] = random_row(rng, slot)
                live[slot].params |= {"temperature": rng.choice([0.0, 0.8]), "seed": number, "top_p": 0.9}
                admit(plain, [live[slot]])
                admit(fused, [live[slot]])
        rows = rng.sample(list(live.values()), rng.randint(1, len(live)))
        logits = random_logits(len(rows), seed=number)
        got = sample(fused, logits.clone(), rows_of(rows)).token_s.tolist()
        assert got == step(plain, rows, logits).token_s.tolist()


@pytest.mark.parametrize(
    ("params", "can_be_captured"),
    [
        ({"temperature": 0.0}, True),
        ({"top_p": 0.5, "logprobs": 2}, True),
        ({"repetition_penalty": 1.2, "logit_bias": {"3": 1.0}}, True),
        ({"allowed_token_ids": [3], "min_tokens": 4, "eos_token_ids": [2]}, True),
        ({"bad_words_ids": [[1, 2]]}, False),
    ],
)
def test_plans_say_what_can_be_captured(params: dict[str, Any], can_be_captured: bool) -> None:
    sampler = make_fused()
    rows = [Row(2, params), Row(3, params), Row(4, params | {"logprobs": 5, "temperature": 0.7})]
    admit(sampler, rows)
    slots = rows_of(rows).host_slots
    assert (sampler.plan(slots[:1]).capture_key is not None) == can_be_captured
    assert sampler.plan(slots[:1]) == sampler.plan(slots[1:2])
    assert sampler.plan(slots) != sampler.plan(slots[:1])


def test_plans_are_equal_where_the_kernels_do_the_same() -> None:
    sampler = make_fused()
    rows = [Row(i, {"seed": i, **params}) for i, params in enumerate(({}, {"temperature": 0.7}, {"temperature": 0.0}))]
    limited = [Row(3, {"seed": 3, "top_p": 0.5}), Row(4, {"seed": 4, "min_p": 0.1, "top_k": 3})]
    admit(sampler, rows + limited)
    slots = rows_of(rows + limited).host_slots
    greedy, draws, limits = sampler.usual_plans()
    assert sampler.plan(slots[2:3]) == greedy
    assert sampler.plan(slots[:2]) == sampler.plan(slots[:3]) == draws
    assert sampler.plan(slots[3:4]) == sampler.plan(slots[4:]) == sampler.plan(slots) == limits


def test_plans_follow_tables_that_move() -> None:
    """A list longer than any before moves the table: what was captured must not be replayed."""
    sampler = make_fused()
    short, long = Row(1, {"logit_bias": {"3": 1.0}}), Row(2, {"logit_bias": {str(i): 1.0 for i in range(30)}})
    admit(sampler, [short])
    before = sampler.plan(rows_of([short]).host_slots)
    admit(sampler, [long])
    assert sampler.plan(rows_of([short]).host_slots) != before


def test_torch_plans_are_never_captured() -> None:
    sampler = make_sampler()
    admit(sampler, [row := Row(1, {"temperature": 0.0})])
    assert sampler.plan(rows_of([row]).host_slots).capture_key is None
