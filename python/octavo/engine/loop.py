"""The engine loop, the only one: commit what came back, plan, launch. The engine process and `LLM` both run it.

Not here: policy (rust/core), execution (worker/), calls (calls.py), sockets (Rust) and processes (process.py).
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from dataclasses import dataclass

from octavo._core import Core, StepPlan
from octavo.engine.calls import Calls
from octavo.worker.base import Runner

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Flight:
    """A step in flight, and its output arena once it is known."""

    plan: StepPlan
    output: int | None = None


class EngineLoop:
    """Keeps up to `depth` steps in flight: while the device runs one, the next is planned and launched.

    An exception out of `step` means that an invariant broke or the device failed; the engine can't go on
    (`crash_report` says what is known).
    """

    def __init__(self, runner: Runner, core: Core) -> None:
        depth = runner.config.scheduler.overlap_depth
        assert depth is not None, "the runner resolves its config"
        self.runner = runner
        self.core = core
        self.depth = depth
        self._calls = Calls(core)
        self._in_flight: deque[Flight] = deque()
        self._last_empty = False

    def step(self) -> bool:
        """One pass. False when nothing was committed, nothing planned, and nothing is in flight."""
        output: int | None = None
        if self._in_flight and (self._last_empty or len(self._in_flight) == self.depth):
            output = self._result(self._in_flight.popleft())
        plan = self.core.step(output)
        self._last_empty = plan.num_rows == 0
        if plan.num_rows:
            self.runner.launch(plan)
            if plan.needs_masks:  # under the forward pass; masks need the tokens of the steps before it
                self.core.fill_masks([self._result(flight) for flight in self._in_flight])
            self.runner.sample(plan)
            self._in_flight.append(Flight(plan))
        if plan.has_calls:
            self._calls.answer_all()
        return output is not None or bool(self._in_flight)

    def _result(self, flight: Flight) -> int:
        """Wait for a step, once."""
        if flight.output is None:
            flight.output = self.runner.result(flight.plan)
        return flight.output

    def close(self) -> None:
        """Release the socket and the device."""
        counted = self.core.stats()
        if counted["num_drafts"]:
            right, drafted = counted["num_accepted_tokens"], counted["num_draft_tokens"]
            logger.info("speculation: %d of %d drafted tokens were right", right, drafted)
        self.core.close()
        self.runner.close()


def crash_report(core: Core, error: BaseException) -> str:
    """For stderr: the control plane's state and last plan, the traceback, and what happened in one line at the end."""
    trace = "".join(traceback.format_exception(error))
    return f"{core.dump()}\n{trace}octavo: the engine broke: {type(error).__name__}: {error}"
