"""What the device can do at most, measured in a second: how fast it reads its memory and how fast it multiplies.

A model's speed says little until it stands beside these. Not here: what fits in memory (memory.py), what the engine
makes of it (octavo/bench.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo._core import cpu_features, cpu_limits

if TYPE_CHECKING:
    from octavo.worker.device import DeviceFacts

COPY_BYTES = 256 << 20
"""More than a device's caches hold."""
MATRIX_SIZE = 4096
RUNS = 20
"""A measurement is the best of as many."""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Of the threads, or the device, that steps run on."""

    name: str
    read_bytes: float
    """A second."""
    macs: dict[str, float]
    """Multiply-adds a second, by number format."""

    def report(self) -> str:
        rates = "".join(f", {name} {rate / 1e9:,.0f} GMAC/s" for name, rate in self.macs.items())
        return f"{self.name}: reads {self.read_bytes / 1e9:,.1f} GB/s{rates}"


def measure_limits(device: DeviceFacts, num_threads: int) -> MachineLimits:
    """Of the current CUDA device, or of so many threads."""
    if device.kind == "cuda":
        import torch

        found = _cuda_limits(device.name)
        torch.cuda.empty_cache()
        return found
    read, int8, f32 = cpu_limits(num_threads)
    threads = f"{num_threads} thread" + ("s" if num_threads > 1 else "")
    return MachineLimits(f"{threads}, {cpu_features()[0]}", read, {"int8": int8, "f32": f32})


def _cuda_limits(name: str) -> MachineLimits:
    """A copy reads and writes; both count."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    left, right, product = (torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    copy_s = _cuda_seconds(lambda: target.copy_(source))
    product_s = _cuda_seconds(lambda: torch.mm(left, right, out=product))
    return MachineLimits(name, 2 * COPY_BYTES / copy_s, {"bf16": MATRIX_SIZE**3 / product_s})


def _cuda_seconds(work: Callable[[], object]) -> float:
    """The best run's time, by the device's clock."""
    import torch

    times = []
    for _ in range(RUNS):
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1000)
    return min(times)
