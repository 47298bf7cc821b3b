"""Every feature, alone and mixed, against the plain-Python oracle: the drawn frequencies' support and the weights."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from oracle import adjusted_logits, distribution
from sampler_driver import VOCAB_SIZE, Row, admit, make_sampler, rows_of, sample, step
from torch import Tensor

from octavo.sampling import sampler as sampler_module
from octavo.sampling import top_k_top_p
from octavo.sampling.base import AdmittedRow
from octavo.sampling.draw import integer_weights

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "tiny-temperature": {"temperature": 1e-6},
    "temperature": {"temperature": 0.37},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 5},
    "top-k-1": {"top_k": 1},
    "top-k-past-the-vocabulary": {"top_k": 1000},
    "top-k-off": {"top_k": -1},
    "top-p": {"top_p": 0.6},
    "top-p-tiny": {"top_p": 1e-9},
    "top-k-top-p": {"top_k": 9, "top_p": 0.5, "temperature": 1.7},
    "min-p": {"min_p": 0.2},
    "min-p-1": {"min_p": 1.0},
    "all-filters": {"min_p": 0.1, "top_k": 12, "top_p": 0.9, "temperature": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.8},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.9, "repetition_penalty": 0.6},
    "bias": {"logit_bias": {"0": -100.0, "5": 3.5, "36": 100.0}},
    "allowed": {"allowed_token_ids": [4, 9, 30]},
    "bad-word": {"bad_words_ids": [[3], [7]]},
    "bad-words": {"bad_words_ids": [[11, 12], [2, 3, 11, 5], [12, 6], [1, 2, 3, 11, 12, 8]]},
    "min-tokens": {"min_tokens": 4, "eos_token_ids": [2], "stop_token_ids": [2, 8]},
    "min-tokens-reached": {"min_tokens": 2, "eos_token_ids": [2]},
    "everything": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"3": 2.0},
        "allowed_token_ids": list(range(2, 30)),
        "bad_words_ids": [[12, 9]],
        "min_tokens": 10,
        "eos_token_ids": [2],
    },
}
PROMPT, OUTPUT = [1, 2, 3], [11, 12]


def seen_logits(monkeypatch: pytest.MonkeyPatch, rows: list[Row], logits: Tensor) -> Tensor:
    """What `draw` is given for rows that are admitted with PROMPT and OUTPUT."""
    seen: list[Tensor] = []
    original = sampler_module.draw

    def spy(logits_sv: Tensor, uniform_su: Tensor) -> Tensor:
        seen.append(logits_sv.clone())
        return original(logits_sv, uniform_su)

    monkeypatch.setattr(sampler_module, "draw", spy)
    sampler = make_sampler(num_slots=len(CASES) + 1)
    admit(sampler, rows)
    sample(sampler, logits.clone(), rows_of(rows))
    return seen[0]


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2.5


@pytest.mark.parametrize("name", [name for name, params in CASES.items() if params.get("temperature", 1.0) >= 1e-5])
def test_distribution_is_the_oracles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(1, seed=len(name))
    row = Row(slot=1, params={**CASES[name], "seed": 5}, prompt=PROMPT, output=OUTPUT)
    weights = integer_weights(seen := seen_logits(monkeypatch, [row], logits), seen.amax(1, keepdim=True))[0].double()
    expected = distribution(logits[0].tolist(), CASES[name], PROMPT, OUTPUT)
    assert (weights / weights.sum()).tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("scale", [0.0, 0.1, 2.0, 30.0])
def test_top_p_takes_the_same_tokens_from_few_candidates_as_from_all(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab_size = 3000
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(8)) * scale
    kept = []
    for candidates in (top_k_top_p._candidates, lambda weight_sv, *_: weight_sv.shape[1]):
        monkeypatch.setattr(top_k_top_p, "_candidates", candidates)
        feature = top_k_top_p.TopKTopP(4, torch.device("cpu"))
        limits = [{"top_p": 0.9}, {"top_p": 0.3, "top_k": 40}, {}, {"top_p": 0.999}]
        rows = [Row(slot, params) for slot, params in enumerate(limits)]
        for row in rows:
            feature.admit(AdmittedRow(row.slot, 0, row.params, np.zeros(1, np.int32), np.zeros(0, np.int32)))
        feature.flush()
        feature.apply(values := logits.clone(), rows_of(rows))
        kept.append(values)
    assert kept[0].equal(kept[1])
    assert kept[0][2].equal(logits[2])
    for row, p in ((0, 0.9), (3, 0.999)):
        ranked = logits[row].double().softmax(0).sort(descending=True).values
        expected = int((ranked.cumsum(0) < p).sum()) + 1
        if scale:  # without ties
            assert int((kept[0][row] > -math.inf).sum()) == pytest.approx(expected, abs=1)


def test_mixed_rows_are_what_they_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(len(CASES), seed=3)
    rows = [Row(slot, {**params, "seed": slot}, PROMPT, OUTPUT) for slot, params in enumerate(CASES.values(), start=1)]
    random.Random(4).shuffle(rows)
    together = make_sampler(num_slots=len(CASES) + 1)
    admit(together, rows)
    tokens = sample(together, logits.clone(), rows_of(rows)).token_s.tolist()
    seen = seen_logits(monkeypatch, rows, logits)
    for i, row in enumerate(rows):
        expected = distribution(logits[i].tolist(), row.params, PROMPT, OUTPUT)
        assert expected[tokens[i]] > 0
        if row.params.get("temperature", 1.0) >= 1e-5:
            weights = integer_weights(seen[i : i + 1], seen[i : i + 1].amax(1, keepdim=True))[0].double()
            assert (weights / weights.sum()).tolist() == pytest.approx(expected, abs=2e-6)
        alone = make_sampler()
        admit(alone, [lonely := Row(0, row.params, PROMPT, OUTPUT)])
        assert sample(alone, logits[i : i + 1].clone(), rows_of([lonely])).token_s.tolist() == [tokens[i]]


@pytest.mark.parametrize("seed", range(4))
def test_state_follows_the_tokens_through_steps_and_slots(seed: int) -> None:
    """Greedy over changing logits with penalties, bad words and min_tokens, sequences coming, going and coming back."""
    rng = random.Random(seed)
    sampler = make_sampler(num_slots=6)
    live: dict[int, Row] = {}
    for number in range(60):
        for slot in rng.sample(range(6), 2):
            if slot not in live or rng.random() < 0.2:
                live[slot] = random_row(rng, slot)
                admit(sampler, [live[slot]])
            elif rng.random() < 0.1:  # preempted: it comes back with what it generated, in another slot if one is free
                row = live.pop(slot)
                row.slot = rng.choice([free for free in range(6) if free not in live])
                live[row.slot] = row
                admit(sampler, [row])
        rows = rng.sample(list(live.values()), rng.randint(1, len(live)))
        logits = random_logits(len(rows), seed=1000 * seed + number)
        expected = []
        for row, values in zip(rows, logits.tolist(), strict=True):
            adjusted = adjusted_logits(values, row.params, row.prompt, row.output)
            expected.append(max(range(VOCAB_SIZE), key=lambda i, adjusted=adjusted: (adjusted[i], -i)))
        assert step(sampler, rows, logits).token_s.tolist() == expected


def random_row(rng: random.Random, slot: int) -> Row:
    ids = range(VOCAB_SIZE)
    options: list[dict[str, Any]] = [
        {"repetition_penalty": rng.choice([0.5, 1.5])},
        {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)},
        {"bad_words_ids": [rng.choices(ids, k=rng.choice([1, 2, 2, 3])) for _ in range(30)]},
        {"bad_words_ids": [[*rng.choices(ids, k=12), i] for i in range(3)]},
        {"min_tokens": rng.randint(1, 6), "eos_token_ids": rng.sample(ids, 20)},
        {"logit_bias": {str(i): rng.uniform(-9, 9) for i in rng.sample(ids, 11)}},
        {"allowed_token_ids": rng.sample(ids, 5)},
    ]
    params: dict[str, Any] = {"temperature": 0.0}
    for chosen in rng.sample(options, rng.randint(0, 3)):
        params |= chosen
    prompt = rng.choices(ids, k=rng.randint(1, 30))
    return Row(slot, params, prompt)


def test_long_bad_words_widen_the_ring_without_forgetting() -> None:
    sampler = make_sampler()
    short = Row(0, {"temperature": 0.0, "bad_words_ids": [[4, 5, 6]]}, prompt=list(range(20)))
    admit(sampler, [short])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 4] = 1.0
    step(sampler, [short], logits)
    long = Row(1, {"temperature": 0.0, "bad_words_ids": [[*range(20), 4]]}, prompt=list(range(20)))
    admit(sampler, [long])
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, 5], logits[1, 4], logits[1, 7] = 1.0, 1.0, 0.5
    assert step(sampler, [short, long], logits).token_s.tolist() == [5, 7]
    logits[0, 6], logits[0, 30] = 2.0, 1.5
    assert step(sampler, [short, long], logits).token_s.tolist() == [30, 4]


def test_nothing_allowed_still_gives_something_allowed() -> None:
    sampler = make_sampler()
    rows = [
        Row(0, {"temperature": 0.0, "allowed_token_ids": [5, 9], "bad_words_ids": [[5], [9]]}),
        Row(1, {"temperature": 0.01, "allowed_token_ids": [5, 9], "bad_words_ids": [[5], [9]], "seed": 1}),
        Row(2, {"temperature": 1e-5, "allowed_token_ids": [8], "min_tokens": 9, "eos_token_ids": [8], "top_p": 0.1}),
        Row(3, {"bad_words_ids": [[i] for i in range(VOCAB_SIZE)], "top_k": 3, "min_p": 0.5, "seed": 3}),
    ]
    admit(sampler, rows)
    tokens = step(sampler, rows, random_logits(4)).token_s.tolist()
    assert tokens[0] == 5
    assert tokens[1] in (5, 9)
    assert tokens[2] == 8
    assert 0 <= tokens[3] < VOCAB_SIZE


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_p": 0.5, "min_p": 0.1}])
def test_strange_logits_have_defined_results(params: dict[str, Any]) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.full((6, VOCAB_SIZE), -inf)
    logits[0, 7] = 0.0  # one finite
    logits[1, :] = nan
    logits[2, :] = nan
    logits[2, 20] = -3.0  # one number among NaN
    logits[4, 11] = inf  # one +inf
    logits[5, :] = random_logits(1)[0]
    logits[5, 5] = nan
    sampler = make_sampler()
    rows = [Row(slot, params) for slot in range(6)]
    admit(sampler, rows)
    tokens = step(sampler, rows, logits).token_s.tolist()
    assert tokens[:5] == [7, 0, 20, 0, 11]
    assert tokens[5] != 5


def test_an_allowed_token_wins_though_the_model_masks_it() -> None:
    sampler = make_sampler()
    row = Row(0, {"temperature": 0.0, "allowed_token_ids": [6, 8]})
    admit(sampler, [row])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [6, 8]] = -math.inf
    assert step(sampler, [row], logits).token_s.tolist() == [6]


def test_ids_past_the_vocabulary_can_not_come_up() -> None:
    sampler = make_sampler()
    params = {
        "temperature": 0.0,
        "bad_words_ids": [[VOCAB_SIZE], [4, VOCAB_SIZE + 7], [5]],
        "min_tokens": 3,
        "eos_token_ids": [VOCAB_SIZE + 1, 6],
    }
    row = Row(0, params)
    admit(sampler, [row])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [5, 6, 7]] = torch.tensor([3.0, 2.0, 1.0])
    assert step(sampler, [row], logits).token_s.tolist() == [7]


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    sampler = make_sampler()
    rows = [Row(0, {"temperature": 0.0}), Row(1, {"temperature": 0.0})]
    admit(sampler, rows)
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[1, [9, 4, 30]] = 1.0
    assert step(sampler, rows, logits).token_s.tolist() == [0, 4]
