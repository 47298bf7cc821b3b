"""Draws: the generator's published answers, the law of large numbers, and independence of everything but the seed."""

from __future__ import annotations

import random

import pytest
import torch
from oracle import distribution
from sampler_driver import VOCAB_SIZE, Row, admit, make_sampler, rows_of, sample, step
from torch import Tensor

from octavo.kernels.reference.uniform import philox, uniform
from octavo.sampling.draw import GROUP, draw, num_uniforms

CHI_SQUARE_LIMIT = 3.3
"""Normal deviations that a chi-square statistic may be off; about 1 in 1000 right generators fail. Seeds are fixed."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(seed: Tensor, index: Tensor, position: Tensor) -> Tensor:
    """One number for each (seed, index, position)."""
    return uniform(seed, index, torch.arange(len(seed)), position, 1)[:, 0]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], expected: str) -> None:
    """Vectors of Random123's kat_vectors, philox4x32 10."""
    words = philox(torch.tensor(counter).unsqueeze(1), torch.tensor(key).unsqueeze(1))
    assert [int(word) for word in words[:, 0]] == [int(word, 16) for word in expected.split()]


def test_uniform_numbers_are_in_range_and_even() -> None:
    position = torch.arange(100_000)
    drawn = numbers(torch.full_like(position, -(2**63)), torch.zeros_like(position), position)
    assert 0 <= drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1
    counts = torch.histc(drawn, bins=100, min=0, max=1)
    statistic = float(((counts - 1000) ** 2 / 1000).sum())
    assert abs(statistic - 99) / (2 * 99) ** 0.5 < CHI_SQUARE_LIMIT


def test_neighbours_in_seed_index_position_and_column_are_unrelated() -> None:
    base = torch.arange(20_000)
    zero = torch.zeros_like(base)
    streams = torch.stack(
        [
            numbers(zero, zero, base),
            numbers(zero + 1, zero, base),
            numbers(zero, zero + 1, base),
            numbers(zero, zero, base + 20_000),
            numbers(zero + (1 << 32), zero, base),
            numbers(base, zero, zero),
            *uniform(zero, zero, base, base, 3)[:, 1:].T,
        ]
    )
    off_diagonal = torch.corrcoef(streams) - torch.eye(len(streams), dtype=torch.float64)
    assert off_diagonal.abs().max() < 0.03


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5, "top_k": 6}, {"top_p": 0.8, "temperature": 1.5}])
def test_frequencies_follow_the_distribution(params: dict[str, float]) -> None:
    num_slots, num_positions = 200, 100
    num_draws = num_slots * num_positions
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(11)) * 1.5
    sampler = make_sampler(num_slots)
    crowd = [Row(slot, {**params, "seed": 99}, prompt=[1], index=slot) for slot in range(num_slots)]
    admit(sampler, crowd)
    rows = rows_of(crowd)
    counts = torch.zeros(VOCAB_SIZE)
    for position in range(num_positions):
        rows.position_s.fill_(position)
        counts += sample(sampler, logits.repeat(num_slots, 1), rows).token_s.bincount(minlength=VOCAB_SIZE)
    expected = torch.tensor(distribution(logits[0].tolist(), dict(params))) * num_draws
    assert (counts[expected == 0] == 0).all()
    possible = expected >= 5
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    assert abs(statistic - freedom) / (2 * freedom) ** 0.5 < CHI_SQUARE_LIMIT


@pytest.mark.parametrize("vocab_size", [1, GROUP - 1, GROUP, 5 * GROUP, 3 * GROUP + 7])
def test_groups_follow_the_distribution(vocab_size: int) -> None:
    num_draws = 20_000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(4)) * 2
    uniforms = torch.rand(num_draws, num_uniforms(vocab_size), dtype=torch.float64, generator=seeded(6))
    counts = draw(logits.expand(num_draws, -1), uniforms).bincount(minlength=vocab_size)
    expected = logits.double().softmax(0) * num_draws
    possible = expected >= 5
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = max(int(possible.sum()) - 1, 1)
    assert abs(statistic - freedom) / (2 * freedom) ** 0.5 < CHI_SQUARE_LIMIT


def test_tokens_without_weight_are_never_drawn() -> None:
    vocab_size = 2 * GROUP + 3
    logits = torch.full((3, vocab_size), -torch.inf)
    logits[0, vocab_size - 1] = -80.0
    logits[1, [5, GROUP]] = torch.tensor([0.0, -1e30])
    uniforms = torch.rand(100, num_uniforms(vocab_size), dtype=torch.float64, generator=seeded(7))
    uniforms[0], uniforms[1] = 0.0, 1 - 2**-53
    for row, token in enumerate((vocab_size - 1, 5, 0)):
        assert (draw(logits[row].expand(100, -1), uniforms) == token).all()


def test_rounding_of_logits_hardly_changes_what_is_drawn() -> None:
    """A batch of another size changes logits by about 1e-5: the tokens must stay, or a seed would promise nothing."""
    vocab_size, num_draws = 49152, 400
    logits = torch.randn(1, vocab_size, generator=seeded(8)) * 3
    uniforms = torch.rand(num_draws, num_uniforms(vocab_size), dtype=torch.float64, generator=seeded(9))
    noise = torch.randn(1, vocab_size, generator=seeded(10)) * 1e-5
    tokens = draw(logits.expand(num_draws, -1), uniforms)
    assert (tokens != draw((logits + noise).expand(num_draws, -1), uniforms)).sum() <= 1
    assert len(tokens.unique()) > num_draws / 2


def test_same_seed_same_tokens_whatever_else_runs() -> None:
    """A sequence alone in slot 0, and in a crowd that changes every step, moving to another slot half way."""
    vocab_size, length = 1009, 40
    logits = torch.randn(length, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    params = {"seed": 1234567890123, "temperature": 0.9, "top_p": 0.97, "frequency_penalty": 0.5}
    alone = make_sampler(vocab_size=vocab_size)
    lonely = Row(0, params, index=2)
    admit(alone, [lonely])
    for number in range(length):
        step(alone, [lonely], logits[number : number + 1])

    rng = random.Random(2)
    crowd = make_sampler(vocab_size=vocab_size)
    social = Row(5, params, index=2)
    admit(crowd, [social])
    for number in range(length):
        if number == length // 2:
            social.slot = 7
            admit(crowd, [social])
        others = [
            Row(slot, rng.choice([{"temperature": 0.0}, {"seed": number, "top_k": 3}, {"seed": 1, "min_p": 0.1}]))
            for slot in rng.sample(range(5), rng.randint(0, 5))
        ]
        admit(crowd, others)
        rows = [*others, social]
        rng.shuffle(rows)
        values = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(number + 50))
        values[rows.index(social)] = logits[number]
        step(crowd, rows, values)
    assert social.output == lonely.output
    assert len(set(lonely.output)) > length // 3


def test_seeds_and_indices_give_different_tokens() -> None:
    sampler = make_sampler(num_slots=8, vocab_size=4096)
    rows = [Row(slot, {"seed": slot // 2}, index=slot % 2) for slot in range(8)]
    admit(sampler, rows)
    tokens = step(sampler, rows, torch.zeros(8, 4096)).token_s.tolist()
    assert len(set(tokens)) == 8
