"""Numerics of the sampling kernels against their reference, in Triton's interpreter. Run by test_sample.py in a process
of its own: TRITON_INTERPRET must be set before triton is imported.

Both sides get numpy's exponential and logarithm here, so that tokens must be equal, not nearly always equal.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import penalties as reference_penalties
from octavo.kernels.reference import sample as reference
from octavo.kernels.reference import token_mask as reference_mask
from octavo.kernels.triton import penalties, token_mask
from octavo.kernels.triton import sample as kernel
from octavo.kernels.triton.interpreter import is_interpreting, mend
from octavo.kernels.triton.sample import Choice, Rows, Scratch

assert is_interpreting()
mend()


@pytest.fixture(autouse=True)
def same_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def integer_weights(x_rv: Tensor, top_r1: Tensor) -> Tensor:
        difference = x_rv - top_r1.clamp(min=torch.finfo(torch.float32).min)
        return (torch.from_numpy(np.exp(difference.numpy())) * float(1 << 40)).long()

    def race(weight_rc: Tensor, uniform_rc: Tensor) -> Tensor:
        uniform = uniform_rc.numpy()
        with np.errstate(divide="ignore"):
            exponential = np.where(uniform == 0, 2.0**-54, -np.log(1 - uniform))
        return (weight_rc / torch.from_numpy(exponential)).argmax(1)

    monkeypatch.setattr(reference, "integer_weights", integer_weights)
    monkeypatch.setattr(reference, "race", race)
    monkeypatch.setattr(kernel, "GATHERED", 1024)


def make_slots(num_slots: int, generator: torch.Generator, vocab_size: int) -> reference.SlotParameters:
    """Every kind of slot, in turn: greedy, plain, top-k, top-p, both, min-p, all; limits from nothing to everything."""

    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        chosen = torch.randint(len(values), (num_slots,), generator=generator)
        return torch.tensor(values, dtype=torch.float64)[chosen].to(dtype)

    kind = torch.arange(num_slots) % 7
    random = kind != 0
    k = pick([1, 2, 5, 50, vocab_size - 1, vocab_size, 2**31 - 1], torch.int64)
    p = pick([1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999999, 1.0], torch.float64)
    min_p = pick([1e-12, 0.01, 0.3, 1.0], torch.float32).log()
    return reference.SlotParameters(
        divisor_s=torch.where(random, pick([1e-5, 0.3, 0.8, 1.0, 3.0], torch.float32), 1.0),
        random_s=random,
        k_s=torch.where((kind == 2) | (kind == 4) | (kind == 6), k, 2**31 - 1),
        p_s=torch.where((kind == 3) | (kind == 4) | (kind == 6), p, 1.0),
        min_p_log_s=torch.where(kind >= 5, min_p, -math.inf),
        seed_s=torch.randint(-(2**63), 2**63 - 1, (num_slots,), generator=generator),
        index_s=torch.randint(0, 9, (num_slots,), generator=generator),
    )


def compare(logits: Tensor, slots: reference.SlotParameters, generator: torch.Generator, choice: Choice) -> Tensor:
    """Tokens of rows in slots of random order, which must be the reference's."""
    num_rows, num_slots = logits.shape[0], slots.k_s.shape[0]
    slot_r = torch.randperm(num_slots, generator=generator)[:num_rows].int()
    position_r = torch.randint(1, 1000, (num_rows,), generator=generator, dtype=torch.int32)
    last = torch.full((num_slots,), -7, dtype=torch.int32)
    arena = torch.full((num_rows, 3), -7, dtype=torch.int32)
    scratch = Scratch.allocate(num_rows, logits.shape[1], logits.device)
    for tensor in vars(scratch).values():
        tensor.fill_(77)
    before = logits.clone()
    tokens = kernel.sample(logits, Rows(slot_r, position_r, last, arena[:, 0]), slots, scratch, choice, pdl=False)
    want = reference.sample(logits, slot_r, position_r, slots)
    assert logits.nan_to_num(1.5).equal(before.nan_to_num(1.5))
    assert tokens.tolist() == want.tolist()
    assert arena[:, 0].tolist() == want.tolist()
    assert arena[:, 1:].eq(-7).all()
    assert last[slot_r.long()].tolist() == want.tolist()
    assert int((last == -7).sum()) == num_slots - num_rows
    return tokens


def awkward(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Rows in turn: as given, rounded (many ties), mostly -inf, NaN and +inf among numbers, constant, all -inf, NaN."""
    num_rows, vocab_size = logits.shape
    few = torch.rand(logits.shape, generator=generator) < 3 / vocab_size
    changed = [
        logits,
        logits.round(),
        logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.99, -math.inf),
        torch.where(few, math.nan, logits),
        torch.where(few, math.inf, logits),
        torch.full_like(logits, -0.0),
        torch.full_like(logits, -math.inf),
        torch.full_like(logits, math.nan),
    ]
    return torch.stack([changed[row % len(changed)][row] for row in range(num_rows)])


@pytest.mark.parametrize("vocab_size", [1, 37, 1024, 4500])
def test_tokens_are_the_references(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    slots = make_slots(60, generator, vocab_size)
    logits = torch.randn(33, vocab_size, generator=generator) * 3
    tokens = compare(awkward(logits, generator), slots, generator, Choice.LIMITED)
    assert len(tokens.unique()) > min(vocab_size, 8) // 2


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("choice", [Choice.GREEDY, Choice.PLAIN])
def test_fewer_launches_give_the_same(choice: Choice, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    slots = make_slots(30, generator, 3000)._replace(
        k_s=torch.full((30,), 2**31 - 1), p_s=torch.ones(30).double(), min_p_log_s=torch.full((30,), -math.inf)
    )
    if choice is Choice.GREEDY:
        slots = slots._replace(random_s=torch.zeros(30, dtype=torch.bool), divisor_s=torch.ones(30))
    logits = (torch.randn(num_rows, 3000, generator=generator) * 3).round()
    compare(logits, slots, generator, choice)


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 12.0])
def test_rows_with_too_many_candidates_search_all(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list has room for 64 values: most rows overflow it."""
    monkeypatch.setattr(kernel, "GATHERED", 64)
    generator = torch.Generator().manual_seed(3)
    slots = make_slots(14, generator, 2100)
    compare(torch.randn(7, 2100, generator=generator) * scale, slots, generator, Choice.LIMITED)


@pytest.mark.parametrize(("k", "p"), [(2**31 - 1, 0.9), (2**31 - 1, 0.5), (150, 1.0), (150, 0.7)])
def test_wide_nuclei_are_narrowed_down(k: int, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with more values at the depth of the bound than can be gathered do not search all logits."""
    monkeypatch.setattr(kernel, "GATHERED", 256)
    generator = torch.Generator().manual_seed(k % 1000 + int(10 * p))
    logits = torch.randn(3, 4500, generator=generator)
    slots = make_slots(3, generator, 4500)._replace(
        divisor_s=torch.ones(3), random_s=torch.ones(3, dtype=torch.bool), min_p_log_s=torch.full((3,), -math.inf),
        k_s=torch.full((3,), k), p_s=torch.full((3,), p, dtype=torch.float64),
    )  # fmt: skip
    found: list[Scratch] = []
    allocate = Scratch.allocate
    monkeypatch.setattr(Scratch, "allocate", lambda *args: found.append(allocate(*args)) or found[-1])
    compare(logits, slots, generator, Choice.LIMITED)
    num_listed_r = found[0].listed_rx[:, 1]
    assert 0 < int(num_listed_r.min()) <= int(num_listed_r.max()) <= 256
    assert num_listed_r.equal(found[0].count_r)


def test_a_deep_tail_counts_for_top_k() -> None:
    """One token far above all others: top-k keeps tokens whose depth is past the last level, or that have no weight."""
    generator = torch.Generator().manual_seed(5)
    slots = make_slots(14, generator, 2000)._replace(k_s=torch.full((14,), 40), divisor_s=torch.ones(14))
    logits = torch.randn(7, 2000, generator=generator)
    logits[:, 1234] += torch.tensor([5.0, 15.0, 24.0, 26.0, 27.5, 29.0, 60.0])
    compare(logits, slots, generator, Choice.LIMITED)


def test_a_token_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(6)
    vocab_size = 2500
    slots = make_slots(40, generator, vocab_size)
    logits = torch.randn(9, vocab_size, generator=generator) * 2
    together = sampled(logits, torch.arange(9), slots)
    for i in (1, 4, 6):
        assert sampled(logits[i : i + 1], torch.tensor([i]), slots) == [together[i]]


def sampled(logits: Tensor, slot_r: Tensor, slots: reference.SlotParameters) -> list[int]:
    rows = Rows(slot_r.int(), slot_r + 10, torch.zeros(40, dtype=torch.int32), torch.zeros(40, dtype=torch.int32))
    scratch = Scratch.allocate(len(slot_r), logits.shape[1], logits.device)
    return kernel.sample(logits, rows, slots, scratch, Choice.LIMITED, pdl=False).tolist()


def test_draws_follow_the_distribution() -> None:
    """Chi-square of many draws of the reference, of which the kernels must give the first few: top-p of top-k of
    tempered logits; kept tokens only, in the right shares."""
    num_draws, num_checked, vocab_size = 20_000, 8, 300
    generator = torch.Generator().manual_seed(8)
    logits_rv = (torch.randn(vocab_size, generator=generator) * 2).expand(num_draws, -1)
    slots = reference.SlotParameters(
        divisor_s=torch.tensor([0.8]),
        random_s=torch.tensor([True]),
        k_s=torch.tensor([20]),
        p_s=torch.tensor([0.9], dtype=torch.float64),
        min_p_log_s=torch.tensor([-math.inf]),
        seed_s=torch.tensor([11]),
        index_s=torch.tensor([0]),
    )
    slot_r, position_r = torch.zeros(num_draws, dtype=torch.int32), torch.arange(num_draws)
    tokens = reference.sample(logits_rv, slot_r, position_r, slots)
    scratch = Scratch.allocate(num_checked, vocab_size, logits_rv.device)
    rows = Rows(slot_r[:num_checked], position_r, slot_r.clone(), slot_r.clone())
    checked = kernel.sample(logits_rv[:num_checked], rows, slots, scratch, Choice.LIMITED, pdl=False)
    assert checked.tolist() == tokens[:num_checked].tolist()

    shares, order = (logits_rv[0].double() / 0.8).softmax(0).sort(descending=True)
    kept = shares[:20] / shares[:20].sum()
    kept = kept[kept.cumsum(0) - kept < 0.9]
    expected = kept / kept.sum() * num_draws
    seen = tokens.bincount(minlength=vocab_size)[order[: len(kept)]]
    assert int(seen.sum()) == num_draws
    assert 4 < len(kept) < 20
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(kept) - 1
    assert abs(statistic - freedom) / (2 * freedom) ** 0.5 < 3.3


@pytest.mark.parametrize("vocab_size", [1, 40, 5003])
def test_penalties(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    num_slots, num_rows = 9, 7

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (num_slots,), generator=generator)]

    tables = [
        torch.rand(num_slots, vocab_size, generator=generator) < 0.3,
        torch.randint(-4, 4, (num_slots, vocab_size), generator=generator, dtype=torch.int32).clamp(min=0),
        pick(1.0, 1.0, 0.5, 1.7),
        pick(0.0, 0.0, -0.7, 1.1),
        pick(0.0, 0.0, -0.3, 2.0),
    ]
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    logits[0, 0], logits[3, vocab_size // 2] = -math.inf, -1e30
    want, slots = logits.clone(), torch.randperm(num_slots, generator=generator)[:num_rows]
    penalties.apply_penalties(logits, slots, *tables)
    reference_penalties.apply_penalties(want, slots, *tables)
    torch.testing.assert_close(logits, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 4095, 4096, 9000])
def test_token_mask(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    num_slots, num_words = 6, -(-vocab_size // 32)
    mask_sw = torch.randint(-(2**31), 2**31, (num_slots + 1, num_words), generator=generator).int()
    mask_sw[-1] = -1
    slot_r = torch.tensor([3, 0, num_slots, 5, num_slots], dtype=torch.int64)
    logits_rv = torch.randn(len(slot_r), vocab_size, generator=generator)
    expected_rv = logits_rv.clone()
    reference_mask.apply_token_mask(expected_rv, slot_r, mask_sw)
    masked_rv = logits_rv.clone()
    token_mask.apply_token_mask(masked_rv, slot_r, mask_sw)
    assert torch.equal(masked_rv, expected_rv)
    assert torch.equal(masked_rv[2], logits_rv[2])
    word, bit = (vocab_size - 1) // 32, (vocab_size - 1) % 32
    is_allowed_r = (mask_sw[slot_r, word] >> bit) & 1 == 1
    assert torch.equal(masked_rv[:, -1] == -torch.inf, ~is_allowed_r)
