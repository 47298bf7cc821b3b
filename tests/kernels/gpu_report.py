"""What the scripts for a GPU share: checks that are counted, parts that may fail alone, times of CUDA graphs."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Report:
    """What was found; `failures` are sentences."""

    started: float = field(default_factory=time.perf_counter)
    failures: list[str] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    def check(self, name: str, error: float, bound: float) -> None:
        """Record an error that must stay below a bound (NaN does not)."""
        self.results.append({"check": name, "error": error, "bound": bound})
        if not error < bound:
            self.failures.append(f"{name}: {error:.2e} is not below {bound:.0e}")
            print("FAIL", self.failures[-1], flush=True)

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:5.1f} s] {text}", flush=True)

    def save(self, path: Path | None, **more: Any) -> None:
        """Everything so far as JSON."""
        if path is not None:
            content = {"gpu": torch.cuda.get_device_name(), **more, "failures": self.failures, "results": self.results}
            path.write_text(json.dumps(content, indent=1))

    def end(self) -> int:
        """Show the failures; the exit code."""
        print(f"{len(self.failures)} failures; {time.perf_counter() - self.started:.0f} s")
        for failure in self.failures:
            print("  ", failure)
        return 1 if self.failures else 0


Part = Callable[[Report], Any]


def run_parts(
    report: Report,
    parts: Mapping[str, Sequence[Part]],
    names: str,
    out: Path | None,
    *,
    budget_s: float = math.inf,
    **more: Any,
) -> list[Any]:
    """Run the parts of these names (with commas), save after each; what they returned, one list. A part that raises is
    a failure and the others still run; none is begun after `budget_s`."""
    found: list[Any] = []
    for run in (run for name in names.split(",") for run in parts[name]):
        if time.perf_counter() - report.started > budget_s:
            report.say(f"out of time: {run.__name__} is left out")
            continue
        try:
            found += run(report) or []
        except Exception as error:
            traceback.print_exc()
            report.failures.append(f"{run.__name__}: {error!r:.300}")
        torch.cuda.empty_cache()
        report.save(out, **more)
    return found


def capture(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Run once, then capture."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_ms(graph: torch.cuda.CUDAGraph, repeats: int = 7, inner: int = 5) -> float:
    """Median time of a replay."""
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return sorted(times)[len(times) // 2]
