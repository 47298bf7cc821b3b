"""Jobs (the inputs of one request) and which inputs run together: fair between jobs, alike in length.

Not here: execution and how jobs arrive. Pure, so that it is tested without a model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from octavo.pooling.answers import Rows
from octavo.pooling.inputs import PoolingInput

WINDOW = 4
"""So many batches are made up at a time: the more, the less padding, and the longer a newcomer waits."""

Item = tuple["Job", int]
"""(job, number of its input)"""
RETRY_AFTER_S = 1.0


class Job:
    """One request's inputs and, as they come, its rows.

    Args:
        deadline_s: Seconds after which a job that was not begun is refused; 0: none.
        on_done: Called with the job when its last row has come.
        on_error: Called with what the client is told ({"error", "kind", …}) instead.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[PoolingInput],
        on_done: Callable[[Job], None],
        on_error: Callable[[dict[str, Any]], None],
        deadline_s: float = 0.0,
    ) -> None:
        self.name = name
        self.inputs = inputs
        self.on_error = on_error
        self.deadline_s = deadline_s
        self.queue_s: float | None = None
        self.num_tokens = sum(len(one.token_ids) for one in inputs)
        self.dropped = False
        self._on_done = on_done
        self._arrival_s = time.monotonic()
        self._rows: list[Rows | None] = [None] * len(inputs)
        self._num_missing = len(inputs)

    @classmethod
    def from_args(
        cls, args: Mapping[str, Any], on_done: Callable[[Job], None], on_error: Callable[[dict[str, Any]], None]
    ) -> Job:
        """From a call's arguments (`call_args`)."""
        types = args["types"]
        inputs = [PoolingInput(ids, types.get(str(number))) for number, ids in enumerate(args["inputs"])]
        if not inputs or not all(one.token_ids for one in inputs):
            raise ValueError("a job has inputs, and inputs have tokens")
        return cls(args["job"], inputs, on_done, on_error, args["deadline_s"])

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._arrival_s

    def begin(self) -> None:
        """An input of it is about to run."""
        if self.queue_s is None:
            self.queue_s = self.waited_s

    def put(self, number: int, row: Rows) -> None:
        """The row of an input has come."""
        self._rows[number] = row
        self._num_missing -= 1
        if self._num_missing == 0 and not self.dropped:
            self.dropped = True
            self._on_done(self)

    def rows(self) -> Rows:
        """[inputs, numbers], once complete."""
        return np.stack([row for row in self._rows if row is not None])


def call_args(name: str, inputs: Sequence[PoolingInput], deadline_s: float) -> dict[str, Any]:
    """A job as JSON."""
    types = {str(number): one.type_ids for number, one in enumerate(inputs) if one.type_ids is not None}
    return {"job": name, "inputs": [one.token_ids for one in inputs], "types": types, "deadline_s": deadline_s}


class Jobs:
    """The queue. Inputs are taken from the jobs in turns, a window of a few batches at a time, sorted by length."""

    def __init__(self, *, max_tokens: int, max_rows: int, max_waiting: int, max_waiting_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._open: dict[str, Job] = {}
        self._waiting: deque[tuple[Job, deque[int]]] = deque()
        """Jobs with inputs that are in no window yet, and those inputs' numbers."""
        self._window: deque[list[Item]] = deque()

    def __len__(self) -> int:
        """Jobs that are not complete."""
        self._forget_done()
        return len(self._open)

    @property
    def num_begun(self) -> int:
        return sum(job.queue_s is not None for job in self._open.values())

    def add(self, job: Job) -> None:
        """Queue a job, or refuse it."""
        self._forget_done()
        num_tokens = sum(each.num_tokens for each in self._open.values())
        if len(self._open) >= self._max_waiting or (
            self._open and num_tokens + job.num_tokens > self._max_waiting_tokens
        ):
            text = f"the queue is full: {len(self._open)} requests with {num_tokens} tokens"
            job.on_error({"error": text, "kind": "overload", "retry_after_s": RETRY_AFTER_S})
            return
        self._open[job.name] = job
        self._waiting.append((job, deque(range(len(job.inputs)))))

    def drop(self, name: str) -> None:
        """Nobody waits for a job any more."""
        job = self._open.pop(name, None)
        if job is not None:
            job.dropped = True

    def next_batch(self) -> list[Item]:
        """What to run now; empty when nothing waits."""
        while True:
            if not self._window:
                self._window.extend(self._cut(self._take()))
            if not self._window:
                self._forget_done()
                return []
            batch = [(job, number) for job, number in self._window.popleft() if not job.dropped]
            if batch:
                for job, _ in batch:
                    job.begin()
                return batch

    def _take(self) -> list[Item]:
        """The inputs of the next window: one of each job in turn."""
        taken: list[Item] = []
        num_tokens = 0
        while self._waiting and num_tokens < WINDOW * self._max_tokens:
            job, numbers = self._waiting.popleft()
            if job.dropped or self._is_late(job):
                continue
            number = numbers.popleft()
            taken.append((job, number))
            num_tokens += len(job.inputs[number].token_ids)
            if numbers:
                self._waiting.append((job, numbers))
        return taken

    def _is_late(self, job: Job) -> bool:
        late = bool(job.deadline_s) and job.queue_s is None and job.waited_s > job.deadline_s
        if late:
            self.drop(job.name)
            text = f"the request waited for more than {job.deadline_s:g} s and was not begun"
            job.on_error({"error": text, "kind": "deadline", "retry_after_s": RETRY_AFTER_S})
        return late

    def _cut(self, items: Sequence[Item]) -> list[list[Item]]:
        """Batches of inputs alike in length, within the limits with their padding."""
        batches: list[list[Item]] = []
        longest = 0
        for job, number in sorted(items, key=lambda item: -len(item[0].inputs[item[1]].token_ids)):
            length = len(job.inputs[number].token_ids)
            rows = len(batches[-1]) if batches else 0
            if not rows or rows == self._max_rows or longest * (rows + 1) > self._max_tokens:
                batches.append([])
                longest = length
            batches[-1].append((job, number))
        return batches

    def _forget_done(self) -> None:
        for name in [name for name, job in self._open.items() if job.dropped]:
            del self._open[name]
