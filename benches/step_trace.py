"""Where the time of every step goes: a trace of an engine loop, for benches that hold one (offline.py --trace).

Of each step: its kind and size, the host's milliseconds by phase (`wait` for the step before, `plan`, `launch`,
`sample`, `other`: frames and text), the device's (`gpu` from the step's first kernel to its last, `gap` idle before
it), and how many kernels were compiled and graphs captured meanwhile. Events are recorded around each step, which costs
some microseconds. Not here: workloads (offline.py).
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PHASES = ("wait", "plan", "launch", "sample", "other")
SLOWEST = 12
"""Steps that are listed one by one."""


@dataclass(slots=True)
class Step:
    """Milliseconds, but for counts."""

    kind: str
    rows: int
    decode_rows: int
    tokens: int
    max_query_len: int
    max_kv_len: int
    at_s: float
    """Since the trace began."""
    host: dict[str, float] = field(default_factory=dict)
    gpu: float = 0.0
    gap: float = 0.0
    compiled: list[str] = field(default_factory=list)
    """Kernels that Triton compiled, or read from its cache, while the step was launched."""
    graphs: int = 0
    """Graphs that were captured."""

    @property
    def size(self) -> str:
        """Kind and tokens, rounded up to a power of two: what the summary groups by."""
        rounded = 1 << (self.tokens - 1).bit_length()
        return f"{self.kind} <= {rounded}"


class Trace:
    """Stands between a loop and its runner and core, and takes the times of their calls."""

    def __init__(self, loop: Any) -> None:
        import torch

        self.steps: list[Step] = []
        self._loop = loop
        self._runner, self._core = loop.runner, loop.core
        self._event: Callable[..., Any] | None = torch.cuda.Event if torch.cuda.is_available() else None
        self._events: list[tuple[Any, Any]] = []
        self._spent: dict[str, float] = defaultdict(float)
        self._compiled: list[str] = []
        self._begin_s = self._last_s = time.perf_counter()
        loop.runner, loop.core = self, _TracedCore(self, loop.core)
        _watch_compiler(self._compiled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def timed(self, phase: str, call: Any, *args: Any) -> Any:
        """Call, and count the time, and what passed since the last call as `other`."""
        start = time.perf_counter()
        self._spent["other"] += 1e3 * (start - self._last_s)
        result = call(*args)
        self._last_s = time.perf_counter()
        self._spent[phase] += 1e3 * (self._last_s - start)
        return result

    def launch(self, plan: Any) -> None:
        only_decodes = plan.num_rows == plan.num_decode_rows
        kind = "decode" if only_decodes else "mixed" if plan.num_decode_rows else "prompts"
        sizes = (plan.num_rows, plan.num_decode_rows, plan.num_tokens, plan.max_query_len, plan.max_kv_len)
        self.steps.append(Step(kind, *sizes, at_s=time.perf_counter() - self._begin_s))
        self._graphs_before = self._num_graphs()
        if self._event is not None:
            pair = self._event(enable_timing=True), self._event(enable_timing=True)
            pair[0].record()
            self._events.append(pair)
        self.timed("launch", self._runner.launch, plan)

    def sample(self, plan: Any) -> None:
        self.timed("sample", self._runner.sample, plan)
        if self._events:
            self._events[-1][1].record()
        step = self.steps[-1]
        step.host, self._spent = dict(self._spent), defaultdict(float)
        step.compiled, self._compiled[:] = list(self._compiled), []
        step.graphs = self._num_graphs() - self._graphs_before

    def result(self, plan: Any) -> int:
        index: int = self.timed("wait", self._runner.result, plan)
        return index

    def _num_graphs(self) -> int:
        graphs = getattr(self._runner, "_graphs", None)
        return 0 if graphs is None else int(graphs.num_captured)

    def end(self) -> list[Step]:
        """Give the loop its own parts back; the steps with the device's times."""
        self._loop.runner, self._loop.core = self._runner, self._core
        previous = None
        for step, (start, stop) in zip(self.steps, self._events, strict=False):
            stop.synchronize()
            step.gpu = start.elapsed_time(stop)
            step.gap = previous.elapsed_time(start) if previous is not None else 0.0
            previous = stop
        return self.steps


class _TracedCore:
    def __init__(self, trace: Trace, core: Any) -> None:
        self._trace, self._core = trace, core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def step(self, output: int | None) -> Any:
        return self._trace.timed("plan", self._core.step, output)


def _watch_compiler(names: list[str]) -> None:
    """Have Triton name the kernels that it compiles or loads from now on."""
    try:
        from triton import knobs
    except ImportError:
        return

    def hook(*args: Any, **values: Any) -> bool:
        names.append(str(values.get("repr", "?")).split("[")[0])
        return False

    knobs.runtime.jit_cache_hook = hook


def summary(steps: list[Step]) -> str:
    """Tables: means by kind and size, then the slowest steps, then what was compiled."""
    groups: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        groups[step.size].append(step)
    head = f"{'steps':<20}{'count':>6}{'sum s':>8}{'gpu':>8}{'gap':>8}" + "".join(f"{p:>8}" for p in PHASES)
    lines = [head + "   mean ms"]
    for size, members in sorted(groups.items()):
        count = len(members)
        total_s = sum(step.gpu + step.gap for step in members) / 1e3
        means = [sum(step.gpu for step in members) / count, sum(step.gap for step in members) / count]
        means += [sum(step.host.get(phase, 0.0) for step in members) / count for phase in PHASES]
        lines.append(f"{size:<20}{count:>6}{total_s:>8.3f}" + "".join(f"{mean:>8.3f}" for mean in means))
    lines.append("slowest:")
    for step in sorted(steps, key=lambda step: -(step.gpu + step.gap))[:SLOWEST]:
        host = " ".join(f"{phase} {ms:.1f}" for phase, ms in step.host.items() if ms > 0.5)
        lines.append(
            f"  {step.at_s:7.3f} s {step.kind} {step.decode_rows}+{step.rows - step.decode_rows} rows {step.tokens}"
            f" tokens kv {step.max_kv_len}: gpu {step.gpu:.1f} gap {step.gap:.1f}; {host};"
            f" {len(step.compiled)} compiled, {step.graphs} captured"
        )
    compiled: dict[str, int] = defaultdict(int)
    for step in steps:
        for name in step.compiled:
            compiled[name] += 1
    lines.append(f"compiled in {sum(1 for step in steps if step.compiled)} steps: {dict(compiled)}")
    lines.append(f"graphs captured: {sum(step.graphs for step in steps)}")
    return "\n".join(lines)


def write(steps: list[Step], path: Path) -> None:
    """All steps, one JSON object a line."""
    path.write_text("".join(json.dumps(asdict(step)) + "\n" for step in steps))
