"""Which inputs share a batch: within the limits, alike in length, fair between jobs; refusals, deadlines and drops."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from octavo.pooling.inputs import PoolingInput
from octavo.pooling.jobs import Item, Job, Jobs, call_args


class Recorder:
    """Makes jobs, and keeps what they answer."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.errors: dict[str, dict[str, Any]] = {}

    def job(self, name: str, lengths: list[int], deadline_s: float = 0.0) -> Job:
        inputs = [PoolingInput([1] * length) for length in lengths]

        def on_error(answer: dict[str, Any]) -> None:
            self.errors[name] = answer

        return Job(name, inputs, lambda job: self.done.append(job.name), on_error, deadline_s)


def queue(max_tokens: int = 64, max_rows: int = 8, max_waiting: int = 100, max_waiting_tokens: int = 10**6) -> Jobs:
    return Jobs(
        max_tokens=max_tokens, max_rows=max_rows, max_waiting=max_waiting, max_waiting_tokens=max_waiting_tokens
    )


def run(batch: list[Item]) -> None:
    for job, number in batch:
        job.put(number, np.full(2, len(job.inputs[number].token_ids), np.float32))


@pytest.mark.parametrize("seed", range(20))
def test_random_traces(seed: int) -> None:
    """Every input runs once, batches keep the limits, rows come in the order of the inputs, and nothing is left."""
    rng = random.Random(seed)
    jobs, recorder = queue(), Recorder()
    alive: dict[str, Job] = {}
    seen: set[tuple[str, int]] = set()
    for step in range(200):
        if rng.random() < 0.4:
            job = recorder.job(f"j{step}", [rng.randint(1, 64) for _ in range(rng.randint(1, 30))])
            alive[job.name] = job
            jobs.add(job)
        if alive and rng.random() < 0.05:
            dropped = rng.choice(sorted(alive))
            jobs.drop(dropped)
            del alive[dropped]
        batch = jobs.next_batch()
        for job, number in batch:
            assert job.name in alive
            assert (job.name, number) not in seen
            seen.add((job.name, number))
        lengths = [len(job.inputs[number].token_ids) for job, number in batch]
        assert len(batch) <= 8
        assert max(lengths, default=0) * len(lengths) <= 64
        run(batch)
        for name in [name for name in alive if name in recorder.done]:
            rows = alive.pop(name).rows()
            job = next(each for each, _ in batch if each.name == name)
            assert rows[:, 0].tolist() == [len(one.token_ids) for one in job.inputs]
    while batch := jobs.next_batch():
        run(batch)
    assert set(alive) <= set(recorder.done)
    assert len(jobs) == 0
    assert not recorder.errors


def test_a_small_job_does_not_wait_for_a_large_one() -> None:
    jobs, recorder = queue(), Recorder()
    jobs.add(recorder.job("large", [16] * 1000))
    run(jobs.next_batch())
    jobs.add(recorder.job("small", [16] * 4))
    num_batches = 0
    while "small" not in recorder.done:
        run(jobs.next_batch())
        num_batches += 1
    assert num_batches <= 8, "the window that was made up, and one more"
    assert "large" not in recorder.done


def test_bounds() -> None:
    jobs, recorder = queue(max_waiting=2, max_waiting_tokens=100), Recorder()
    jobs.add(recorder.job("larger than the bound, but alone", [50] * 10))
    jobs.add(recorder.job("refused", [1]))
    assert recorder.errors["refused"]["kind"] == "overload"
    jobs.drop("larger than the bound, but alone")
    for name in ("a", "b", "c"):
        jobs.add(recorder.job(name, [1]))
    assert "the queue is full: 2 requests" in recorder.errors["c"]["error"]


def test_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("octavo.pooling.jobs.time.monotonic", lambda: now_s)
    jobs, recorder = queue(max_tokens=4), Recorder()
    jobs.add(recorder.job("begun", [4] * 20, deadline_s=5))
    jobs.add(recorder.job("patient", [4]))
    run(jobs.next_batch())
    jobs.add(recorder.job("late", [4], deadline_s=5))
    now_s = 106.0
    while batch := jobs.next_batch():
        run(batch)
    assert recorder.errors["late"]["kind"] == "deadline"
    assert sorted(recorder.done) == ["begun", "patient"]


def test_arguments_of_a_call() -> None:
    inputs = [PoolingInput([1, 2]), PoolingInput([3, 4], [0, 1])]
    args = call_args("name", inputs, 2.5)
    job = Job.from_args(args, lambda job: None, lambda answer: None)
    assert (job.name, job.inputs, job.deadline_s) == ("name", inputs, 2.5)
    with pytest.raises(ValueError, match="inputs have tokens"):
        Job.from_args({**args, "inputs": [[]]}, lambda job: None, lambda answer: None)
