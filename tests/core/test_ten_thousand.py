"""10,000 random requests through one engine with a cache far too small: all outputs right, nothing left behind."""

from __future__ import annotations

import random

import pytest
from core_driver import Driver, expected_tokens
from plain_scheduler import Limits, PlainScheduler, Request


def request_of(r: random.Random, request_id: int) -> Request:
    length = r.randint(1, 40)
    family = r.randrange(20)
    return Request(
        request_id,
        tuple((family * 11 + i) % 50 for i in range(length)),
        n=r.choice([1] * 9 + [3]),
        max_tokens=r.randint(1, 16),
        stop=tuple(r.sample(range(50), 3)),
        priority=r.randint(0, 2),
    )


@pytest.mark.parametrize(("depth", "policy"), [(1, "fcfs"), (2, "priority")])
def test_ten_thousand_requests(depth: int, policy: str) -> None:
    r = random.Random(depth)
    limits = Limits(
        block_size=4,
        num_blocks=80,
        max_num_seqs=32,
        max_num_batched_tokens=128,
        max_model_len=64,
        policy=policy,
        enable_prefix_caching=True,
        long_prefill_token_threshold=24,
        depth=depth,
    )
    driver, plain = Driver(limits), PlainScheduler(limits)
    sent: list[Request] = []
    while len(sent) < 10_000:
        for _ in range(r.randrange(6)):
            sent.append(request_of(r, len(sent)))
            driver.add(sent[-1])
        if r.random() < 0.3:
            driver.abort(r.randrange(max(len(sent) - 60, 0), len(sent) + 1), r.choice([None, 0]))
        driver.step()
    driver.core.check()
    driver.run(100_000)
    driver.core.check()
    stats = driver.core.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert min(stats[name] for name in ("num_preemptions", "num_aborted", "prefix_hit_tokens")) > 100
    for request in sent:
        for index in range(request.n):
            outcome = driver.outcomes[(request.request_id, index)]
            tokens = expected_tokens(request, index, plain.max_output(request))
            if outcome.finish_reason == "abort":
                tokens = tokens[: len(outcome.tokens)]
            assert outcome.tokens == tokens
