"""kernels/cuda/wide_gemm.cu on a Hopper GPU: numerics of every configuration, then which one is best inside a layer.

    PYTHONPATH=python python tests/kernels/gpu_wide.py --out wide.json [--model llama|qwen3-8b|qwen3-0.6b]
        [--rows 128,256]

Numerics run in a process of their own an op (a kernel that hangs traps, which ends its process only); a configuration
that is wrong is not timed. Timing is coordinate descent in a chain of layers whose weights are larger than the L2.
Tables last; the exit code is 1 if anything failed. `tests/run` does not run it (no test_ prefix).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from fused_models import LLAMA_8B, QWEN3_06B, QWEN3_8B, Sizes
from fused_steps import relative_error
from torch import Tensor

from octavo.kernels.cuda.wide_gemm import Operands, Wide, WideLaunch, wide_launch
from octavo.kernels.reference.skinny_linear import gated_linear, linear, rms_norm
from octavo.kernels.triton.gated import gated_silu
from octavo.kernels.triton.launch import compile_together
from octavo.kernels.triton.rms_norm import add_rms_norm
from octavo.kernels.triton.skinny_linear import (
    ResidualStream,
    SkinnyLinear,
    SplitScratch,
    add_residual,
    scaled_store,
)

DEVICE = "cuda"
BF16 = torch.bfloat16
MODELS = {"llama": LLAMA_8B, "qwen3-8b": QWEN3_8B, "qwen3-0.6b": QWEN3_06B}
EPILOGUE = {"qkv": "store", "o": "residual", "gate_up": "silu", "down": "residual"}
ORDER = ("gate_up", "down", "qkv", "o")
CANDIDATES: dict[tuple[str, int], list[tuple[int, ...]]] = {
    # block_n, boxes, stages, cm, cn, ck
    ("qkv", 128): [
        (64, 1, 8, 1, 1, 1), (48, 2, 5, 1, 1, 1), (48, 2, 5, 1, 2, 1), (48, 2, 5, 1, 4, 1), (64, 2, 4, 1, 2, 1),
        (96, 1, 7, 1, 1, 2), (96, 1, 7, 1, 2, 2), (32, 2, 5, 1, 2, 1), (128, 1, 6, 1, 1, 4), (64, 2, 4, 1, 1, 2),
    ],
    ("o", 128): [
        (64, 1, 8, 1, 1, 1), (32, 2, 5, 1, 1, 1), (32, 2, 5, 1, 2, 1), (32, 2, 5, 1, 4, 1), (64, 2, 4, 1, 1, 2),
        (64, 2, 4, 1, 2, 2), (128, 1, 6, 1, 1, 4), (64, 1, 8, 1, 1, 4), (32, 2, 5, 1, 1, 2), (32, 2, 5, 1, 1, 4),
    ],
    ("gate_up", 128): [
        (128, 1, 6, 1, 1, 1), (224, 1, 5, 1, 1, 1), (224, 1, 5, 1, 2, 1), (224, 1, 5, 1, 4, 1), (128, 1, 6, 1, 2, 1),
        (256, 1, 4, 1, 2, 1), (192, 1, 5, 1, 2, 1), (96, 1, 7, 1, 2, 1), (48, 2, 5, 1, 2, 1), (112, 1, 7, 1, 2, 1),
    ],
    ("down", 128): [
        (64, 1, 8, 1, 1, 1), (128, 1, 6, 1, 1, 4), (128, 1, 6, 1, 2, 4), (64, 2, 4, 1, 1, 2), (64, 2, 4, 1, 2, 2),
        (32, 2, 5, 1, 2, 1), (32, 2, 5, 1, 4, 1), (128, 1, 6, 1, 2, 2), (32, 2, 5, 1, 1, 4),
    ],
    ("qkv", 256): [
        (128, 1, 6, 1, 1, 1), (96, 1, 7, 2, 1, 1), (96, 2, 4, 2, 1, 1), (96, 2, 4, 1, 1, 1), (128, 1, 6, 2, 1, 1),
        (192, 1, 5, 2, 1, 2), (64, 2, 4, 2, 1, 1), (48, 2, 5, 2, 2, 1), (96, 2, 4, 1, 2, 1), (96, 1, 7, 2, 2, 1),
    ],
    ("o", 256): [
        (128, 1, 6, 1, 1, 1), (64, 2, 4, 2, 1, 1), (64, 1, 8, 2, 1, 1), (128, 1, 6, 2, 1, 2), (64, 2, 4, 1, 1, 1),
        (256, 1, 4, 2, 1, 4), (64, 2, 4, 2, 2, 1), (128, 1, 6, 1, 1, 2), (32, 2, 5, 2, 1, 1), (32, 2, 5, 2, 2, 1),
    ],
    ("gate_up", 256): [
        (128, 1, 6, 1, 1, 1), (224, 1, 5, 2, 1, 1), (224, 1, 5, 1, 1, 1), (256, 1, 4, 2, 1, 1), (128, 1, 6, 2, 1, 1),
        (224, 1, 5, 1, 2, 1), (192, 1, 5, 2, 1, 1), (96, 1, 7, 2, 1, 1), (48, 2, 5, 2, 1, 1), (224, 1, 5, 2, 2, 1),
        (112, 1, 7, 2, 1, 1),
    ],
    ("down", 256): [
        (128, 1, 6, 1, 1, 1), (256, 1, 4, 2, 1, 4), (128, 1, 6, 2, 1, 2), (128, 1, 6, 2, 2, 2), (128, 1, 6, 1, 1, 2),
        (64, 2, 4, 2, 1, 1), (64, 1, 8, 2, 1, 1), (64, 2, 4, 2, 2, 1), (64, 2, 4, 2, 1, 2), (32, 2, 5, 2, 1, 2),
    ],
}  # fmt: skip
LAYERS = 6


def shapes(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """op -> (n, k); n of gate_up is that of its output."""
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    products = {"qkv": (query + 2 * key, sizes.hidden), "o": (sizes.hidden, query)}
    return products | {"gate_up": (sizes.inner, sizes.hidden), "down": (sizes.hidden, sizes.inner)}


def candidates(op: str, bucket: int, n: int, k: int) -> list[Wide]:
    """Those that fit; beyond 256 rows those of 256 that do not split k (or share both operands)."""
    found = [Wide(*c) for c in CANDIDATES[op, min(bucket, 256)]]
    return [c for c in found if c.fits(EPILOGUE[op], n, k)]


def num_programs() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def compile_all(launches: list[WideLaunch]) -> None:
    """On all cores."""
    unique = {launch.variant: launch for launch in launches}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(WideLaunch.warm_up, unique.values()))


# --- numerics


def case(op: str, n: int, k: int, rows: int, bucket: int) -> tuple[Callable[[Wide], WideLaunch], Callable[[], Any]]:
    """(config -> launch, () -> [(name, actual, expected)]) of random inputs."""
    matrix_rows = 2 * n if op == "gate_up" else n
    weight = torch.randn(matrix_rows, k, device=DEVICE, dtype=BF16) * k**-0.5
    x = torch.randn(rows, k, device=DEVICE, dtype=BF16) * (1 if EPILOGUE[op] == "residual" else 3)
    if EPILOGUE[op] == "residual":
        gain = (0.5 + torch.rand(n, device=DEVICE)).to(BF16)
        before = torch.randn(rows, n, device=DEVICE, dtype=BF16)
        residual, gained = before.clone(), torch.empty_like(before)
        squares = torch.empty(n * 512, device=DEVICE)
        expected = before.float() + x.float() @ weight.float().T

        def make(config: Wide) -> WideLaunch:
            residual.copy_(before)
            gained.fill_(torch.nan)
            squares.fill_(torch.nan)
            made.append(config)
            operands = Operands(x, weight, residual, gained_mn=gained, gain_n=gain, squares_out=squares)
            return wide_launch(config, operands, "residual", bucket=bucket, partials=0, eps=0, num_programs=PROGRAMS)

        made: list[Wide] = []

        def outputs() -> list[tuple[str, Tensor, Tensor]]:
            parts = n // made[-1].block_n * made[-1].ck
            sums = squares.view(-1)[: parts * bucket].view(parts, bucket)[:, :rows].sum(0)
            return [
                ("residual", residual, expected),
                ("gained", gained, residual.float() * gain.float()),
                ("squares", sums, residual.float().square().sum(1)),
            ]

        return make, outputs
    gain = 0.5 + torch.rand(k, device=DEVICE)
    gained = (x.float() * gain).to(BF16)
    partials = 5
    squares = torch.zeros(partials, bucket, device=DEVICE)
    squares[:, :rows] = torch.stack([part.float().square().sum(1) for part in x.tensor_split(partials, dim=1)])
    y = torch.empty(rows, n, device=DEVICE, dtype=BF16)
    reference = gated_linear if op == "gate_up" else linear
    wanted = reference(rms_norm(x, gain, 1e-5), weight, None)

    def make_plain(config: Wide) -> WideLaunch:
        y.fill_(torch.nan)
        operands = Operands(gained, weight, y, squares_in=squares)
        epilogue = EPILOGUE[op]
        return wide_launch(
            config, operands, epilogue, bucket=bucket, partials=partials, eps=1e-5, num_programs=PROGRAMS
        )

    return make_plain, lambda: [("y", y, wanted)]


def where(actual: Tensor, expected: Tensor) -> str:
    """Which eighths of rows and columns are wrong."""
    if actual.ndim == 1:
        return f"first {actual[:4].tolist()} for {expected[:4].tolist()}"
    blocks = []
    for i, (a_rows, e_rows) in enumerate(zip(actual.chunk(8), expected.chunk(8), strict=True)):
        for j, (a, e) in enumerate(zip(a_rows.chunk(8, 1), e_rows.chunk(8, 1), strict=True)):
            error = relative_error(a, e)
            if not error < 8e-3:
                blocks.append(f"({i},{j}) {error:.2g}")
    return f"{len(blocks)} of 64 blocks wrong: " + " ".join(blocks[:6])


def guarded(launch: WideLaunch) -> WideLaunch:
    """With waits that trap when they last too long."""
    return replace(launch, macros=(*launch.macros, ("GUARD", 1)))


def check_op(sizes: Sizes, op: str, buckets: list[int]) -> dict[str, str]:
    """Configuration -> "" or what is wrong with it."""
    n, k = shapes(sizes)[op]
    verdict: dict[str, str] = {}
    todo = []
    for bucket in buckets:
        for rows in (bucket, bucket - 29):
            make, outputs = case(op, n, k, rows, bucket)
            todo += [(bucket, rows, config, make, outputs) for config in candidates(op, bucket, n, k)]
    compile_all([guarded(make(config)) for *_, config, make, _ in todo])
    for bucket, rows, config, make, outputs in todo:
        key = json.dumps([op, bucket, astuple(config)])
        print(f"BEGIN {key} {rows} rows", flush=True)
        worst = ""
        for repeat in range(2):
            guarded(make(config)).run(pdl=bool(repeat))
            torch.cuda.synchronize()
            for name, actual, expected in outputs():
                error = relative_error(actual, expected)
                if not error < 8e-3:
                    worst = f"{rows} rows, {name}: error {error:.2g}; {where(actual, expected)}"
        verdict[key] = verdict.get(key) or worst
        print(f"RESULT {json.dumps([key, worst])}", flush=True)
    return verdict


def run_check(op: str, args: argparse.Namespace) -> tuple[str, str, int]:
    """(output, errors, exit code) of the process that checks an op."""
    command = [sys.executable, __file__, "--check", op, "--model", args.model, "--rows", args.rows]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=45)
    except subprocess.TimeoutExpired as gone:
        return (gone.stdout or b"").decode(), "timeout", 124
    return done.stdout, done.stderr, done.returncode


def check_all(args: argparse.Namespace) -> tuple[set[str], list[str]]:
    """(configurations that are right, failures): one process an op."""
    good: set[str] = set()
    bad: set[str] = set()
    failures = []
    with ThreadPoolExecutor(len(ORDER)) as pool:
        found = list(pool.map(lambda op: run_check(op, args), ORDER))
    for op, (out, err, code) in zip(ORDER, found, strict=True):
        for line in out.splitlines():
            if line.startswith("RESULT "):
                key, worst = json.loads(line[7:])
                (bad if worst else good).add(key)
                if worst:
                    failures.append(f"{key}: {worst}")
        if code:
            begun = [line for line in out.splitlines() if line.startswith("BEGIN")]
            failures.append(f"{op}: exit {code} at {begun[-1:]}: {err[-700:]}")
    return good - bad, failures


# --- time


class Chain:
    """LAYERS layers' products of one bucket, by wide launches, by the ring, or by cuBLAS."""

    def __init__(self, sizes: Sizes, rows: int, bucket: int) -> None:
        self.sizes, self.rows, self.bucket = sizes, rows, bucket
        self.shapes = shapes(sizes)
        self.weights = [
            {
                op: torch.randn(2 * n if op == "gate_up" else n, k, device=DEVICE, dtype=BF16) * k**-0.5
                for op, (n, k) in self.shapes.items()
            }
            for _ in range(LAYERS)
        ]
        hidden = sizes.hidden
        self.residual = torch.randn(rows, hidden, device=DEVICE, dtype=BF16)
        self.gained = torch.randn(rows, hidden, device=DEVICE, dtype=BF16)
        self.gain = torch.ones(hidden, device=DEVICE, dtype=BF16)
        self.squares = torch.ones(hidden * 128, device=DEVICE)
        self.qkv = torch.empty(rows, self.shapes["qkv"][0], device=DEVICE, dtype=BF16)
        self.attended = torch.randn(rows, self.shapes["o"][1], device=DEVICE, dtype=BF16)
        self.activated = torch.empty(rows, sizes.inner, device=DEVICE, dtype=BF16)

    def launches(self, configs: dict[str, Wide]) -> list[WideLaunch]:
        """The chain's kernels."""
        o, down = configs["o"], configs["down"]
        o_parts = self.shapes["o"][0] // o.block_n * o.ck
        down_parts = self.shapes["down"][0] // down.block_n * down.ck
        residual = {"gained_mn": self.gained, "gain_n": self.gain, "squares_out": self.squares}
        found = []
        for w in self.weights:
            operands = {
                "qkv": (Operands(self.gained, w["qkv"], self.qkv, squares_in=self.squares), down_parts),
                "o": (Operands(self.attended, w["o"], self.residual, **residual), 0),
                "gate_up": (Operands(self.gained, w["gate_up"], self.activated, squares_in=self.squares), o_parts),
                "down": (Operands(self.activated, w["down"], self.residual, **residual), 0),
            }
            for op, (what, partials) in operands.items():
                found.append(
                    wide_launch(
                        configs[op], what, EPILOGUE[op], bucket=self.bucket, partials=partials, eps=1e-5,
                        num_programs=PROGRAMS,
                    )
                )  # fmt: skip
        return found

    def time_wide(self, configs: dict[str, Wide], only: str | None = None) -> float:
        """us a layer (of one op alone: its launches in a row)."""
        launches = self.launches(configs)
        if only is not None:
            launches = launches[list(self.shapes).index(only) :: 4]
        compile_all(launches)
        return time_us(lambda: [launch.run() for launch in launches])

    def time_blas(self, only: str | None = None) -> float:
        """With torch's products and the joins between them."""

        def run() -> None:
            for w in self.weights:
                qkv = torch.mm(self.gained, w["qkv"].T) if only in (None, "qkv") else None
                del qkv
                if only in (None, "o"):
                    x = torch.mm(self.attended, w["o"].T)
                if only is None:
                    x, _ = add_rms_norm(x, self.residual, self.gain, 1e-5, pdl=True)
                else:
                    x = self.gained
                if only in (None, "gate_up"):
                    y = torch.mm(x, w["gate_up"].T)
                act = gated_silu(y, pdl=True) if only is None else self.activated
                if only in (None, "down"):
                    x = torch.mm(act, w["down"].T)
                if only is None:
                    add_rms_norm(x, self.residual, self.gain, 1e-5, pdl=True)

        return time_us(run)

    def time_ring(self) -> float:
        """The fused decode kernels of at most 128 rows."""
        stream = ResidualStream.allocate(self.sizes.hidden, BF16, torch.device(DEVICE))
        made = [{op: SkinnyLinear.make(op, w[op], None) for op in w} for w in self.weights]
        split = SplitScratch.allocate([p for layer in made for p in layer.values()], torch.device(DEVICE))
        launches = []
        for p in made:
            down, o = p["down"].num_tiles(self.rows), p["o"].num_tiles(self.rows)
            launches += [
                scaled_store(p["qkv"], stream, self.qkv, partials=down, epilogue="store", eps=1e-5),
                add_residual(p["o"], self.attended, stream, self.gain, split),
                scaled_store(p["gate_up"], stream, self.activated, partials=o, epilogue="silu", eps=1e-5),
                add_residual(p["down"], self.activated, stream, self.gain, split),
            ]
        compile_together(launches)
        return time_us(lambda: [launch.run() for launch in launches])


def time_us(run: Callable[[], Any]) -> float:
    """Median time of a layer in a graph of LAYERS."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / 4 / LAYERS)
    return sorted(times)[len(times) // 2]


def tune(sizes: Sizes, rows: int, bucket: int, good: set[str], deadline: float) -> dict[str, Any]:
    """Coordinate descent over the configurations that are right."""
    chain = Chain(sizes, rows, bucket)
    kept = {
        op: [c for c in candidates(op, bucket, *chain.shapes[op]) if json.dumps([op, bucket, astuple(c)]) in good]
        for op in ORDER
    }
    report: dict[str, Any] = {"rows": rows, "bucket": bucket, "blas_us": chain.time_blas(), "tried": []}
    report["blas_alone_us"] = {op: chain.time_blas(op) for op in ORDER}
    if rows <= 128:
        report["ring_us"] = chain.time_ring()
    if not all(kept.values()):
        return report | {"missing": [op for op in ORDER if not kept[op]]}
    best = {op: kept[op][0] for op in ORDER}
    best_us = chain.time_wide(best)
    for op in ORDER:
        for config in kept[op]:
            if time.perf_counter() > deadline:
                break
            us = chain.time_wide(best | {op: config})
            report["tried"].append([op, astuple(config), round(us, 2)])
            if us < best_us:
                best, best_us = best | {op: config}, us
    report["wide_us"] = best_us
    report["best"] = {op: astuple(c) for op, c in best.items()}
    report["alone_us"] = {op: chain.time_wide(best, op) for op in ORDER}
    return report


def print_report(report: dict[str, Any]) -> None:
    line = f"{report['rows']} rows: us a layer: cuBLAS + joins {report['blas_us']:.1f}"
    line += f", ring {report['ring_us']:.1f}" if "ring_us" in report else ""
    print(line + f", wide {report.get('wide_us', float('nan')):.1f}; missing {report.get('missing', 'none')}")
    for op in ORDER:
        alone = report.get("alone_us", {}).get(op, float("nan"))
        print(
            f"    {op:8s} best {report.get('best', {}).get(op)} alone {alone:.1f} us, cuBLAS alone"
            f" {report['blas_alone_us'][op]:.1f}; in chain: "
            + " ".join(f"{tuple(c)}={us:.1f}" for o, c, us in report["tried"] if o == op)
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--rows", default="128,256")
    parser.add_argument("--check", choices=ORDER)
    parser.add_argument("--budget", type=float, default=95.0)
    args = parser.parse_args()
    started = time.perf_counter()
    rows = [int(r) for r in args.rows.split(",")]
    torch.manual_seed(0)
    with torch.inference_mode():
        if args.check:
            check_op(MODELS[args.model], args.check, rows)
            return 0
        good, failures = check_all(args)
        print(f"[{time.perf_counter() - started:.0f} s] {len(good)} configurations are right", flush=True)
        reports = []
        for i, count in enumerate(rows):
            left = args.budget - (time.perf_counter() - started)
            deadline = time.perf_counter() + left / (len(rows) - i)
            reports.append(tune(MODELS[args.model], count, count, good, deadline))
            torch.cuda.empty_cache()
    for report in reports:
        print_report(report)
    print(f"{len(failures)} failures; {time.perf_counter() - started:.0f} s")
    for failure in failures[:12]:
        print("  ", failure)
    if args.out:
        args.out.write_text(json.dumps({"reports": reports, "failures": failures, "good": sorted(good)}, indent=1))
    return 1 if failures else 0


PROGRAMS = num_programs() if torch.cuda.is_available() else 132

if __name__ == "__main__":
    sys.exit(main())
