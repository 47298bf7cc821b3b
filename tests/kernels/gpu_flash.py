"""Attention of prompts by the optional packages, FlashAttention 3 and FlashInfer, beside Octavo's kernel, on a GPU.

    pip install tokenspeed-fa3 flashinfer-python; PYTHONPATH=python python tests/kernels/gpu_flash.py

Runs those that are installed. Compares all with the reference, then times them. FlashInfer compiles its kernels when
they are first needed. The exit code is 1 if anything differs. `tests/run` does not run it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from fused_steps import relative_error
from gpu_report import Report, capture, run_parts, time_ms
from paged_steps import Step, make_step

from octavo.attention.base import AttentionBackend, make_backend
from octavo.errors import ConfigError

OPTIONAL = ("flash", "flashinfer")
BF16 = torch.bfloat16
Rows = list[tuple[int, int]]
LLAMA = {"heads": 32, "kv_heads": 8, "dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "32 heads on 8, 128 dims": LLAMA,
    "32 heads on 8, 128 dims, window 200": LLAMA | {"window": 200},
    "32 heads on 8, 128 dims, soft cap 30": LLAMA | {"soft_cap": 30.0},
    "14 heads on 2, 64 dims": {"heads": 14, "kv_heads": 2, "dim": 64},
    "8 heads on 4, 256 dims": {"heads": 8, "kv_heads": 4, "dim": 256},
    "12 heads on 12, 128 dims": {"heads": 12, "kv_heads": 12, "dim": 128},
}
CHECKS: dict[str, Rows] = {
    "mixed": [(1, 1), (1, 700), (300, 900), (130, 130), (77, 2000)],
    "prompts": [(64, 64), (500, 500), (2, 1000)],
}
TIMED: dict[str, Rows] = {
    "1 x 2048": [(2048, 2048)],
    "16 x 1024": [(1024, 1024)] * 16,
    "4 x 2048": [(2048, 2048)] * 4,
    "1 x 8192": [(8192, 8192)],
    "chunk 2048 of 8192": [(2048, 8192)] * 4,
}
BOUND = 8e-3


def installed() -> dict[str, AttentionBackend]:
    """Backends by name: Octavo's, and those whose package is there."""
    backends = {"triton": make_backend("triton")}
    for name in OPTIONAL:
        try:
            backends[name] = make_backend(name)
        except ConfigError as error:
            print(f"left out: {error}", flush=True)
    return backends


@torch.inference_mode()
def check(report: Report) -> None:
    """Every backend's distance to the reference, on prompts and on steps with decode rows."""
    backends = installed()
    for shape, sizes in SHAPES.items():
        for name, rows in CHECKS.items():
            step = make_step(rows, **sizes, block_size=64, dtype=BF16, device="cuda", poison=0.0)
            inputs = step.spec, step.q_thd, step.k_tgd, step.v_tgd
            expected = make_backend("reference").attend(*inputs, step.clone_ctx())
            for key, backend in backends.items():
                error = relative_error(backend.attend(*inputs, step.clone_ctx()), expected)
                report.check(f"{key}: {shape}, {name}", error, BOUND)
        report.say(f"{shape}: compared")


@torch.inference_mode()
def time_all(report: Report) -> None:
    """A layer's time as a replayed graph, and what the first layer of a step takes longer, on the host."""
    backends = installed()
    for name, rows in TIMED.items():
        step = make_step(rows, **LLAMA, block_size=64, dtype=BF16, device="cuda", poison=0.0)
        pairs = sum(queries * (length - (queries - 1) / 2) for queries, length in rows)
        flop = 4 * pairs * LLAMA["heads"] * LLAMA["dim"]
        shown = []
        for key, backend in backends.items():
            ms, first_ms = layer_ms(backend, step), first_layer_ms(backend, step)
            report.results.append({"backend": key, "rows": name, "ms": ms, "first_layer_ms": first_ms})
            shown.append(f"{key} {ms:.3f} ms = {flop / ms / 1e9:.0f} TFLOP/s, a step's first layer {first_ms:.2f} ms")
        report.say(f"{name}: " + "; ".join(shown))


def layer_ms(backend: AttentionBackend, step: Step) -> float:
    """Of a layer, the step's tables made."""
    return time_ms(capture(lambda: backend.attend_cached(step.spec, step.q_thd, step.ctx)))


def first_layer_ms(backend: AttentionBackend, step: Step) -> float:
    """Median over new steps, waited for."""
    times = []
    for _ in range(9):
        backend.prepare(step.ctx)
        torch.cuda.synchronize()
        started = time.perf_counter()
        backend.attend_cached(step.spec, step.q_thd, step.ctx)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return sorted(times)[len(times) // 2]


PARTS = {"numerics": [check], "times": [time_all]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="of %(default)s")
    parser.add_argument("--out", type=Path, help="results as JSON")
    args = parser.parse_args()
    report = Report()
    run_parts(report, PARTS, args.parts, args.out)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
