"""The loop's order of calls, with a scripted control plane and runner: what is committed when, at every depth."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from octavo._core import Core
from octavo.config import EngineConfig, SchedulerConfig
from octavo.engine.calls import Calls
from octavo.engine.loop import EngineLoop, crash_report
from octavo.engine.process import run_until_stopped
from octavo.worker.base import Runner


@dataclasses.dataclass
class Plan:
    step_id: int
    num_rows: int
    has_calls: bool = False
    needs_masks: bool = False


class ScriptedCore:
    """Plans what the script says, then empty plans; notes what was committed and what was answered."""

    def __init__(self, rows: list[int], calls: list[tuple[int, int, bytes]] | None = None) -> None:
        self.rows = rows
        self.calls = calls or []
        self.committed: list[int | None] = []
        self.replies: list[tuple[int, int, dict[str, Any]]] = []
        self.num_steps = 0

    def step(self, output: int | None) -> Plan:
        self.committed.append(output)
        self.num_steps += 1
        return Plan(self.num_steps, self.rows.pop(0) if self.rows else 0, bool(self.calls))

    def take_calls(self) -> list[tuple[int, int, bytes]]:
        calls, self.calls = self.calls, []
        return calls

    def reply(self, client: int, call_id: int, body: bytes) -> None:
        self.replies.append((client, call_id, json.loads(body)))

    def stats(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def reset_prefix_cache(self) -> bool:
        return True

    def dump(self) -> str:
        return "state of the core"


class ScriptedRunner:
    """Notes the order of its calls; a step's output is its id."""

    def __init__(self, depth: int) -> None:
        self.config = EngineConfig(scheduler=SchedulerConfig(overlap_depth=depth))
        self.log: list[str] = []
        self.chores: Iterator[str] = iter(())

    def launch(self, plan: Plan) -> None:
        self.log.append(f"launch {plan.step_id}")

    def sample(self, plan: Plan) -> None:
        self.log.append(f"sample {plan.step_id}")

    def result(self, plan: Plan) -> int:
        self.log.append(f"result {plan.step_id}")
        return plan.step_id


def make_loop(depth: int, core: ScriptedCore) -> tuple[EngineLoop, ScriptedRunner]:
    runner = ScriptedRunner(depth)
    return EngineLoop(cast(Runner, runner), cast(Core, core)), runner


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_never_more_than_depth_in_flight_and_nothing_left(depth: int) -> None:
    core = ScriptedCore([1] * 6)
    loop, runner = make_loop(depth, core)
    while loop.step():
        pass
    in_flight, peak = 0, 0
    for line in runner.log:
        in_flight += {"launch": 1, "sample": 0, "result": -1}[line.split()[0]]
        peak = max(peak, in_flight)
    assert in_flight == 0
    assert peak == depth
    assert [c for c in core.committed if c is not None] == [1, 2, 3, 4, 5, 6]


def test_depth_1_commits_before_it_plans() -> None:
    core = ScriptedCore([1, 1])
    loop, runner = make_loop(1, core)
    assert [loop.step() for _ in range(4)] == [True, True, True, False]
    assert runner.log == ["launch 1", "sample 1", "result 1", "launch 2", "sample 2", "result 2"]
    assert core.committed == [None, 1, 2, None]


def test_depth_2_launches_before_it_waits() -> None:
    core = ScriptedCore([1, 1, 1])
    loop, runner = make_loop(2, core)
    while loop.step():
        pass
    assert runner.log[:6] == ["launch 1", "sample 1", "launch 2", "sample 2", "result 1", "launch 3"]
    assert core.committed[:3] == [None, None, 1]


def test_an_empty_plan_makes_the_loop_take_what_is_in_flight() -> None:
    core = ScriptedCore([1, 0, 1])
    loop, runner = make_loop(2, core)
    assert [loop.step() for _ in range(3)] == [True, True, True]
    assert runner.log == ["launch 1", "sample 1", "result 1", "launch 3", "sample 3"]


def test_calls_are_answered_between_steps_and_mistakes_too() -> None:
    calls = [(1, 7, b'{"name":"ping"}'), (2, 8, b'{"name":"reset_prefix_cache"}'), (1, 9, b'{"name":"nonsense"}')]
    core = ScriptedCore([], calls)
    loop, _ = make_loop(1, core)
    loop.step()
    assert core.replies[:2] == [(1, 7, {"num_steps": 1}), (2, 8, {"complete": True})]
    assert "known: ping" in core.replies[2][2]["error"]


def test_a_call_that_is_no_json_breaks_nothing() -> None:
    core = ScriptedCore([], [(1, 1, b"{"), (1, 2, b"[]"), (1, 3, b'{"name":"stats"}')])
    Calls(cast(Core, core)).answer_all()
    assert [sorted(reply[2]) for reply in core.replies] == [["error"], ["error"], ["num_steps"]]


def test_a_crash_report_ends_with_what_happened() -> None:
    try:
        raise RuntimeError("block 3 is free twice")
    except RuntimeError as error:
        report = crash_report(cast(Core, ScriptedCore([])), error)
    lines = report.splitlines()
    assert lines[0] == "state of the core"
    assert lines[-1] == "octavo: the engine broke: RuntimeError: block 3 is free twice"


def test_chores_are_done_while_idle_one_at_a_time_and_never_instead_of_work() -> None:
    core = ScriptedCore([0, 1, 0, 0, 0])
    loop, runner = make_loop(1, core)
    stopped = threading.Event()

    def chores() -> Iterator[str]:
        for name in ("first", "second"):
            runner.log.append(name)
            yield name

    def wait(timeout_s: float) -> bool:
        stopped.set()
        return False

    runner.chores = chores()
    core.wait = wait  # type: ignore[attr-defined]
    try:
        run_until_stopped(loop, stopped)
    finally:
        gc.enable()
        gc.unfreeze()
    assert runner.log == ["first", "launch 2", "sample 2", "result 2", "second"]
