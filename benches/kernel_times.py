"""What the device did during a call: each kernel's share, and where it had nothing to do (offline.py --kernels).

Times are the profiler's (CUPTI): it slows the host by some microseconds a launch, and not the kernels. A gap is time in
which no kernel runs, named by the kernels before and after it. Not here: the host's phases (step_trace.py).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

STEP_BEGIN = "prepare_kernel"
"""Runs once in every step, first of all."""
LISTED = 14
NAME_WIDTH = 70


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    start_us: float
    end_us: float


def recorded(call: Callable[[], Any]) -> tuple[Any, list[Kernel]]:
    """What `call` returns, and the kernels and copies that ran on the device meanwhile, by their start."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from octavo import envs

    envs.keep_cupti()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        result = call()
        torch.cuda.synchronize()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = (e for e in profiler.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA)
    kernels = [Kernel(e.name(), e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3) for e in events]
    return result, sorted(kernels, key=lambda kernel: kernel.start_us)


def gaps(kernels: list[Kernel]) -> list[tuple[str, float]]:
    """("before -> after", microseconds) of every time without a kernel."""
    found, last = [], kernels[0]
    for kernel in kernels[1:]:
        if kernel.start_us > last.end_us:
            found.append((f"{short(last.name)} -> {short(kernel.name)}", kernel.start_us - last.end_us))
        if kernel.end_us > last.end_us:
            last = kernel
    return found


def short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH // 2 else name[: NAME_WIDTH // 2 - 1] + "…"


def table(title: str, entries: list[tuple[str, float]]) -> list[str]:
    """The greatest sums of entries (name, microseconds), a line each."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, us in entries:
        by_name[name].append(us)
    ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:LISTED]
    lines = [
        f"  {sum(us) / 1e3:9.2f} ms {len(us):6d} x {statistics.median(us):8.1f} us  {name[:NAME_WIDTH]}"
        for name, us in ordered
    ]
    return [f" {title}: total, number, median", *lines]


def summary(kernels: list[Kernel]) -> str:
    """Span, idle time, the median step, and both tables."""
    if not kernels:
        return "no kernel ran on the device"
    idle = gaps(kernels)
    span_us = max(kernel.end_us for kernel in kernels) - kernels[0].start_us
    begins = [kernel.start_us for kernel in kernels if STEP_BEGIN in kernel.name]
    steps = [b - a for a, b in pairwise(begins)]
    lines = [f"span {span_us / 1e3:.2f} ms, without a kernel {sum(us for _, us in idle) / 1e3:.2f} ms"]
    if steps:
        lines.append(f" {len(begins)} steps, median {statistics.median(steps) / 1e3:.3f} ms from one to the next")
    lines += table("kernels", [(kernel.name, kernel.end_us - kernel.start_us) for kernel in kernels])
    return "\n".join(lines + table("gaps", idle))
