"""The real scheduler against the plain one: same rows, same blocks, same counts at every step of random traces."""

from __future__ import annotations

import random

import pytest
from core_driver import Driver, expected_tokens
from plain_scheduler import Limits, PlainScheduler, Request


def random_limits(r: random.Random) -> Limits:
    return Limits(
        block_size=r.randint(1, 5),
        num_blocks=r.randint(4, 40),
        max_num_seqs=r.randint(1, 7),
        max_num_batched_tokens=r.randint(1, 40),
        max_model_len=r.randint(8, 48),
        policy=r.choice(["fcfs", "priority"]),
        enable_prefix_caching=r.random() < 0.7,
        long_prefill_token_threshold=r.choice([0, 0, 1, 4]),
        depth=r.randint(1, 4),
    )


def random_request(r: random.Random, request_id: int) -> Request:
    """Prompts share prefixes."""
    base = [(i * 7 + r.randrange(2)) % 50 if i % 9 == 8 else i for i in range(r.randrange(30))]
    tail = [r.randrange(50) for _ in range(r.randrange(1, 4))]
    return Request(
        request_id,
        tuple(base + tail),
        n=r.choice([1, 1, 1, 2, 4]),
        max_tokens=r.randint(1, 20),
        min_tokens=r.choice([0, 0, 3]),
        stop=tuple(r.sample(range(50), r.choice([0, 2, 6]))),
        priority=r.randint(-1, 1),
        salt=r.choice([b"", b"", b"x"]),
    )


def compare_step(
    driver: Driver, plain: PlainScheduler, adds: list[Request], aborts: list[tuple[int, int | None]]
) -> None:
    for request in adds:
        driver.add(request)
    for request_id, index in aborts:
        driver.abort(request_id, index)
    committed, step = driver.step()
    copies = plain.num_copies
    rows = plain.step(committed.sampled if committed else None, aborts, adds)
    assert step.rows == [(row.seq.name, row.start, row.length) for row in rows]
    assert len(step.sampled) == sum(row.sampled for row in rows)
    assert step.num_decodes == sum(row.sampled and row.length == 1 for row in rows)
    assert step.num_copies == plain.num_copies - copies
    size = driver.limits.block_size
    assert step.tables == [row.seq.blocks[: -(-(row.start + row.length) // size)] for row in rows]
    stats = driver.core.stats()
    assert stats["num_free_blocks"] == len(plain.blocks.free)
    assert stats["num_running"] == len(plain.in_state("running"))
    assert stats["num_waiting"] == len(plain.in_state("waiting"))
    assert stats["prefix_hit_tokens"] == plain.num_hit_tokens
    assert stats["num_preemptions"] == plain.num_preemptions
    driver.core.check()


def play(seed: int) -> dict[str, int]:
    r = random.Random(seed)
    limits = random_limits(r)
    driver, plain = Driver(limits), PlainScheduler(limits)
    sent: list[Request] = []
    for _ in range(r.randint(5, 40)):
        adds = [random_request(r, len(sent) + i) for i in range(r.choice([0, 0, 1, 1, 2, 5]))]
        sent += adds
        aborts = [(r.randrange(len(sent)), r.choice([None, 0, 1]))] if sent and r.random() < 0.1 else []
        compare_step(driver, plain, adds, aborts)
    for _ in range(20_000):
        if not driver.core.has_work():
            break
        compare_step(driver, plain, [], [])
    assert not driver.core.has_work(), driver.core.dump()
    assert not plain.seqs
    for request in sent:
        for index in range(request.n if plain.fits(request) else 0):
            outcome = driver.outcomes[(request.request_id, index)]
            tokens = expected_tokens(request, index, plain.max_output(request))
            wanted = tokens[: len(outcome.tokens)] if outcome.finish_reason == "abort" else tokens
            assert outcome.tokens == wanted
            assert outcome.finish_reason is not None
    return driver.core.stats() | {"num_copies": plain.num_copies}


@pytest.mark.parametrize("seed", range(10))
def test_the_plain_scheduler_plans_the_same(seed: int) -> None:
    totals = dict.fromkeys(["num_preemptions", "num_aborted", "prefix_hit_tokens", "num_copies", "num_refused"], 0)
    for trace in range(20):
        stats = play(1000 * seed + trace)
        totals = {name: count + stats[name] for name, count in totals.items()}
    assert all(totals.values()), f"traces that exercise too little: {totals}"
