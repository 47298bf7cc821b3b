"""The engine loop, the only one: commit what came back, plan, launch. The engine process and `LLM` both run it.

Not here: policy (rust/core), execution (worker/), sockets (Rust) and processes (process.py).
"""

from __future__ import annotations

import json
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from octavo._core import Core, StepPlan
from octavo.worker.base import Runner


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
        self._in_flight: deque[StepPlan] = deque()
        self._last_empty = False

    def step(self) -> bool:
        """One pass. False when nothing was committed, nothing planned, and nothing is in flight."""
        output: int | None = None
        if self._in_flight and (self._last_empty or len(self._in_flight) == self.depth):
            output = self.runner.result(self._in_flight.popleft())
        plan = self.core.step(output)
        self._last_empty = plan.num_rows == 0
        if plan.num_rows:
            self.runner.launch(plan)
            self.runner.sample(plan)
            self._in_flight.append(plan)
        if plan.has_calls:
            answer_calls(self.core)
        return output is not None or bool(self._in_flight)

    def close(self) -> None:
        """Release the socket and the device."""
        self.core.close()
        self.runner.close()


def _ping(core: Core) -> dict[str, Any]:
    return {"num_steps": core.stats()["num_steps"]}


def _stats(core: Core) -> dict[str, Any]:
    return core.stats()


def _reset_prefix_cache(core: Core) -> dict[str, Any]:
    return {"complete": core.reset_prefix_cache()}


CALLS: dict[str, Callable[[Core], dict[str, Any]]] = {
    "ping": _ping,
    "stats": _stats,
    "reset_prefix_cache": _reset_prefix_cache,
}


def answer_calls(core: Core) -> None:
    """Answer what clients asked between two steps; a malformed or unknown call is answered with an error."""
    for client, call_id, body in core.take_calls():
        core.reply(client, call_id, json.dumps(_answer(core, body)).encode())


def _answer(core: Core, body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except ValueError:
        return {"error": "a call is a JSON object"}
    call = CALLS.get(str(request.get("name"))) if isinstance(request, dict) else None
    if call is None:
        return {"error": f"unknown call; known: {', '.join(CALLS)}"}
    return call(core)


def crash_report(core: Core, error: BaseException) -> str:
    """For stderr: the control plane's state and last plan, the traceback, and what happened in one line at the end."""
    trace = "".join(traceback.format_exception(error))
    return f"{core.dump()}\n{trace}octavo: the engine broke: {type(error).__name__}: {error}"
