"""The loop of an engine that pools: take jobs, run the next batch, answer jobs that are complete.

The same process, socket and calls as the generating engine's (loop.py); a job is a call whose answer comes later. Not
here: execution (pooling/runner.py) and which texts share a batch (pooling/jobs.py).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo._core import Core
from octavo.engine.calls import Args, Calls, Reply
from octavo.pooling.answers import Rows
from octavo.pooling.inputs import PoolingInput
from octavo.pooling.jobs import Job, Jobs
from octavo.pooling.runner import PoolingRunner

NUM_ARENAS = 2
"""The control plane wants one more than steps in flight."""


class PoolingLoop:
    """An exception out of `step` means that the device failed; the engine can't go on."""

    def __init__(self, runner: PoolingRunner, core: Core) -> None:
        scheduler = runner.config.scheduler
        assert scheduler.max_num_batched_tokens is not None, "the runner resolves its config"
        assert scheduler.max_num_seqs is not None, "the runner resolves its config"
        self.runner = runner
        self.core = core
        self._arenas = _register_arenas(core)
        self.jobs = Jobs(
            max_tokens=scheduler.max_num_batched_tokens,
            max_rows=scheduler.max_num_seqs,
            max_waiting=scheduler.max_queued_requests,
            max_waiting_tokens=scheduler.max_queued_tokens,
        )
        self._num_steps = 0
        self._num_tokens = 0
        self._calls = Calls(core, self._stats, {"pool": self._add, "drop_pooled": self._drop})

    def step(self) -> bool:
        """One pass; False when there was nothing to run."""
        if self.core.step(None).has_calls:
            self._calls.answer_all()
        return self._run_batch()

    def run(self, inputs: Sequence[PoolingInput]) -> Rows:
        """[inputs, numbers]: for a caller in this process, who waits."""
        done: list[Job] = []
        self.jobs.add(Job("", inputs, done.append, _no_refusal))
        while not done:
            self._run_batch()
        return done[0].rows()

    def _run_batch(self) -> bool:
        batch = self.jobs.next_batch()
        if batch:
            rows = self.runner.run([job.inputs[number] for job, number in batch])
            self._num_steps += 1
            self._num_tokens += sum(len(job.inputs[number].token_ids) for job, number in batch)
            for (job, number), row in zip(batch, rows, strict=True):
                job.put(number, row)
        return bool(batch)

    def _add(self, args: Args, reply: Reply) -> None:
        def done(job: Job) -> None:
            rows = job.rows()
            data = base64.b64encode(rows.tobytes()).decode()
            reply({"rows": data, "shape": list(rows.shape), "queue_s": job.queue_s})

        self.jobs.add(Job.from_args(args, done, reply))

    def _drop(self, args: Args, reply: Reply) -> None:
        self.jobs.drop(str(args.get("job")))
        reply({})

    def _stats(self) -> dict[str, Any]:
        """The control plane's numbers, with this loop's in their places."""
        return {
            **self.core.stats(),
            "num_steps": self._num_steps,
            "num_running": self.jobs.num_begun,
            "num_waiting": len(self.jobs) - self.jobs.num_begun,
            "num_prompt_tokens": self._num_tokens,
        }

    def close(self) -> None:
        """Release the socket and the device."""
        self.core.close()
        self.runner.close()


def _no_refusal(answer: dict[str, Any]) -> None:
    raise AssertionError(f"one job at a time is never refused: {answer}")


def _register_arenas(core: Core) -> list[NDArray[np.int32]]:
    """What the control plane writes its plans into: they stay empty, as no request for generation gets here."""
    inputs = [np.zeros(core.arena_layout.num_ints, np.int32) for _ in range(NUM_ARENAS)]
    outputs = [np.zeros(core.output_layout.num_ints, np.int32) for _ in range(NUM_ARENAS)]
    core.register([each.data for each in inputs], [each.data for each in outputs])
    return [*inputs, *outputs]
