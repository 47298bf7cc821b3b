"""Times the small kernels of a step (small_kernels.py) on a GPU, each in a CUDA graph, against what the card copies.

    PYTHONPATH=python timeout 60 python tests/kernels/gpu_small.py --out small.json [--only kv_write,prepare]
    TRITON_INTERPRET=1 PYTHONPATH=python python tests/kernels/gpu_small.py --tiny

First numbers against the references, then times: a launch after the other over inputs that together exceed the L2 cache
(where they are large enough for it), so a launch's time includes what it takes to start one, which is printed first.
`--tiny`: numbers alone, at sizes for Triton's interpreter. Exit code 1 when a number is wrong.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_report import Report, capture, time_ms
from small_kernels import ROWS, Case, Place, Row

from octavo.kernels.reference.quantize_rows import FP8
from octavo.kernels.triton import quantize_rows
from octavo.kernels.triton.interpreter import mend
from octavo.kernels.triton.target import has_dependent_launches

PEAK_FLOPS = 989e12
"""Dense bf16 of an H200."""
TOGETHER_BYTES = 256 << 20
"""Inputs of one row's launches: four times the L2 cache."""
CHAIN = 32
"""Launches of a graph, at most; and at least a quarter of them."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
ROUNDED_BOUND = 4e-2
"""Of rows in e4m3."""


@triton.jit
def one_store_kernel(x_ptr):
    tl.store(x_ptr, 1.0)


def graph_us(launches: list[Any]) -> float:
    """Of one launch."""

    def run() -> None:
        for launch in launches:
            launch()

    return 1e3 * time_ms(capture(run), repeats=5, inner=3) / len(launches)


def measure_card(report: Report) -> tuple[float, float]:
    """(bytes/s of a copy, read and written; us of a launch that does nothing)."""
    source, target = (torch.empty(1 << 28, device="cuda") for _ in range(2))
    copy = partial(torch.neg, source, out=target)  # `copy_` becomes a node of the copy engine, which is slower
    copied = 2 * source.nbytes / (1e-6 * graph_us([copy] * 4))
    x = torch.empty(1, device="cuda")
    floor_us = graph_us([lambda: one_store_kernel[(1,)](x)] * CHAIN)
    report.results.append({"copy_bytes_per_s": copied, "launch_us": floor_us})
    report.say(f"a copy moves {copied / 1e12:.2f} TB/s; a launch takes {floor_us:.2f} us")
    return copied, floor_us


def check(report: Report, row: Row, case: Case, dtype: torch.dtype) -> None:
    bound = ROUNDED_BOUND if case.rounds and dtype != torch.float32 else BOUNDS[dtype]
    report.check(f"{row.kernel}, {row.label}", case.error(), bound)


def time_row(report: Report, row: Row, first: Case, place: Place, copied: float) -> None:
    """Print and keep a row of the table."""
    count = max(2, min(CHAIN, -(-TOGETHER_BYTES // first.num_bytes)))
    cases = [first, *(row.case(place) for _ in range(count - 1))]
    us = graph_us([case.run for case in cases] * max(1, CHAIN // 4 // count))
    share, speed = first.num_bytes / copied / (us * 1e-6), first.num_flops / PEAK_FLOPS / (us * 1e-6)
    found = {"kernel": row.kernel, "label": row.label, "us": us, "bytes": first.num_bytes, "share": share}
    report.results.append(found | {"flop_share": speed})
    arithmetic = f", {100 * speed:.0f}% of arithmetic" if first.num_flops else ""
    moved = f"{first.num_bytes / 1e6:9.2f} MB, {100 * share:3.0f}% of a copy"
    print(f"| {row.kernel:22} | {row.label:36} | {us:8.1f} us | {moved}{arithmetic}", flush=True)


@torch.inference_mode()
def run_rows(report: Report, rows: list[Row], place: Place, *, is_tiny: bool) -> None:
    """Every row; one that raises is a failure, and the others still run."""
    copied, _ = (0.0, 0.0) if is_tiny else measure_card(report)
    for row in rows:
        try:
            torch.manual_seed(0)
            case = row.case(place, is_tiny=is_tiny)
            check(report, row, case, place.dtype)
            if not is_tiny:
                time_row(report, row, case, place, copied)
        except Exception as error:
            report.failures.append(f"{row.kernel}, {row.label}: {error!r:.300}")
            print("FAIL", report.failures[-1], flush=True)
        if not is_tiny:
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("small.json"))
    parser.add_argument("--only", default="", help="kernels, with commas; a part of a name is enough")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else [""]
    rows = [row for row in ROWS if any(name in row.kernel for name in wanted)]
    report, cuda = Report(), torch.device("cuda")
    if args.tiny:
        mend()
        quantize_rows.FP8 = torch.float32
        run_rows(report, rows, Place(torch.device("cpu"), torch.float32, torch.float32, pdl=False), is_tiny=True)
    else:
        place = Place(cuda, torch.bfloat16, FP8, pdl=has_dependent_launches(cuda))
        run_rows(report, rows, place, is_tiny=False)
        report.save(args.out)
    print(f"{len(rows)} rows")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
