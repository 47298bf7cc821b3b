"""Ten thousand random requests through the loop, the control plane and the router, in a cache too small for them.

They are aborted, dropped, stopped, cut into chunks and preempted; nothing may leak, hang or depend on the depth.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from octavo._core import Delta
from octavo.engine.build import build_engine
from octavo.engine.loop import EngineLoop
from octavo.engine.request import RequestFactory, Terms
from octavo.engine.router import FrameRouter
from octavo.errors import OctavoError
from octavo.sampling_params import SamplingParams

from .conftest import fake_config

NUM_REQUESTS = 5_000
MAX_OPEN = 40


@dataclass
class Heard:
    """A sink that remembers."""

    n: int
    number: int = 0
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    num_ends: int = 0
    error: OctavoError | None = None

    def push(self, delta: Delta) -> None:
        assert self.num_ends == 0
        assert delta.index not in self.reasons
        self.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            self.reasons[delta.index] = delta.finish_reason

    def finish(self, error: OctavoError | None) -> None:
        self.num_ends += 1
        self.error = error


class Traffic:
    """A client that changes its mind."""

    def __init__(self, loop: EngineLoop, seed: int) -> None:
        self.loop = loop
        self.random = random.Random(seed)
        self.factory = RequestFactory(loop.runner.facts, None, seed=0)
        self.router = FrameRouter(loop.runner.facts, None, loop.core.add)
        self.prefix = [self.random.randrange(1000) for _ in range(60)]
        self.all: list[Heard] = []
        self.open: list[Heard] = []

    def submit(self) -> None:
        r = self.random
        prompt = self.prefix[: r.randrange(60)] + [r.randrange(1000) for _ in range(r.randint(1, 40))]
        params = SamplingParams(
            max_tokens=r.choice([1, 2, 5, 30, 60]),
            n=r.choice([1, 1, 1, 3]),
            min_tokens=r.choice([0, 0, 1]),
            stop_token_ids=r.choices(range(32000), k=r.choice([0, 500])),
            logprobs=r.choice([None, None, 2]),
            prompt_logprobs=r.choice([None, None, None, 1]),
        )
        terms = Terms(priority=r.randrange(3), cache_salt=r.choice(["", "", "salt"]))
        request = self.factory.prepare(prompt, params, terms=terms)
        heard = Heard(params.n)
        heard.number = self.router.submit(request, heard)
        self.all.append(heard)
        self.open.append(heard)

    def disturb(self) -> None:
        """Abort one request, or drop it as if its reader had left."""
        if self.open:
            victim = self.random.choice(self.open)
            self.random.choice([self.router.abort, self.router.drop])(victim.number)

    def turn(self) -> None:
        worked = self.loop.step()
        for body in self.loop.core.take_frames():
            self.router.feed(body)
        self.open = [heard for heard in self.open if heard.num_ends == 0]
        assert worked or not self.open or self.loop.core.has_work(), "requests wait and nothing happens"


@pytest.mark.parametrize(("depth", "policy"), [(1, "fcfs"), (2, "priority"), (3, "fcfs")])
def test_ten_thousand_random_requests(depth: int, policy: str) -> None:
    config = fake_config(
        num_gpu_blocks_override=14,
        max_model_len=200,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        long_prefill_token_threshold=24,
        overlap_depth=depth,
        scheduling_policy=policy,
    )
    loop = build_engine(config, lambda stage, fraction: None)
    traffic = Traffic(loop, seed=depth)
    while len(traffic.all) < NUM_REQUESTS or traffic.open:
        while len(traffic.all) < NUM_REQUESTS and len(traffic.open) < traffic.random.randrange(MAX_OPEN):
            traffic.submit()
        if traffic.random.random() < 0.2:
            traffic.disturb()
        traffic.turn()
        if traffic.random.random() < 0.01:
            loop.core.check()
    while loop.core.has_work():
        loop.step()
    loop.core.check()
    stats = loop.core.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_preemptions"] > 100
    assert stats["prefix_hit_tokens"] > 10_000
    assert stats["num_aborted"] > 100
    assert [heard.num_ends for heard in traffic.all] == [1] * NUM_REQUESTS
    assert [heard.error for heard in traffic.all if heard.error] == []
    finished = [heard for heard in traffic.all if len(heard.reasons) == heard.n]
    assert len(finished) > NUM_REQUESTS // 2
    assert {reason for heard in finished for reason in heard.reasons.values()} == {"stop", "length", "abort"}
    loop.close()
