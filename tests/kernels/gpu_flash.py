"""Attention of prompts by FlashAttention 3 beside Octavo's kernel, on a Hopper GPU with the package installed.

    pip install tokenspeed-fa3; PYTHONPATH=python python tests/kernels/gpu_flash.py

Compares both with each other, then times them. The exit code is 1 if they differ. `tests/run` does not run it.
"""

from __future__ import annotations

import sys

import torch
from fused_steps import relative_error
from gpu_report import Report, capture, time_ms
from paged_steps import make_step

from octavo.attention.base import make_backend

SHAPES = {"llama": {"heads": 32, "kv_heads": 8, "dim": 128}, "qwen3-30b": {"heads": 32, "kv_heads": 4, "dim": 128}}
CHECKS = {
    "mixed": [(1, 1), (1, 700), (300, 900), (130, 130), (77, 2000)],
    "prompts": [(64, 64), (500, 500), (2, 1000)],
}
TIMED = {"16 x 2048": [(2048, 2048)] * 16, "1 x 2048": [(2048, 2048)], "1 x 8192": [(8192, 8192)]}
TIMED |= {"chunk 2048 of 8192": [(2048, 8192)] * 4}


@torch.inference_mode()
def main() -> int:
    report = Report()
    backends = {name: make_backend(name) for name in ("triton", "flash")}
    for shape, heads in SHAPES.items():
        for name, rows in CHECKS.items():
            for window in (0, 200):
                step = make_step(
                    rows, **heads, window=window, block_size=64, dtype=torch.bfloat16, device="cuda", poison=0.0
                )
                inputs = step.spec, step.q_thd, step.k_tgd, step.v_tgd
                found = {key: backend.attend(*inputs, step.clone_ctx()) for key, backend in backends.items()}
                report.check(f"{shape} {name} window {window}", relative_error(*found.values()), 8e-3)
        for name, rows in TIMED.items():
            step = make_step(rows, **heads, block_size=64, dtype=torch.bfloat16, device="cuda", poison=0.0)
            pairs = sum(queries * (length - (queries - 1) / 2) for queries, length in rows)
            times = {}
            for key, backend in backends.items():
                run = lambda b=backend: b.attend_cached(step.spec, step.q_thd, step.ctx)  # noqa: B023, E731
                times[key] = time_ms(capture(run))
            flop = 4 * pairs * heads["heads"] * heads["dim"]
            report.say(
                f"{shape} {name}: "
                + ", ".join(f"{key} {ms:.3f} ms = {flop / ms / 1e9:.0f} TFLOP/s" for key, ms in times.items())
            )
    print(f"{len(report.failures)} failures")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
