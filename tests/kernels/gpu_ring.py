"""Configurations of the ring (kernels/triton/ring_gemm.py) in a chain of layers on a Hopper GPU, for skinny_table.py.

    PYTHONPATH=python python tests/kernels/gpu_ring.py --out ring.json [--model llama|qwen3-8b|qwen3-0.6b] [--rows 128]
        [--ops gate_up,down,qkv,o,head]

Coordinate descent in a chain of layers whose weights are larger than the L2 cache, beginning with the table's entries;
the head is timed alone. Every candidate's result is compared with torch's product before it is timed. Winners are
printed last. The exit code is 1 if a candidate was wrong. `tests/run` does not run it (no test_ prefix).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from fused_models import LLAMA_8B, QWEN3_06B, QWEN3_8B, Sizes
from fused_steps import relative_error
from gpu_fused import product_shapes
from gpu_report import Report, capture, time_ms

from octavo.kernels.triton.launch import Launch, compile_together
from octavo.kernels.triton.skinny_linear import (
    ResidualStream,
    SkinnyLinear,
    SplitScratch,
    add_residual,
    scaled_store,
    store,
)
from octavo.kernels.triton.skinny_table import SHARED_BYTES, Ring

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
MODELS = {"llama": LLAMA_8B, "qwen3-8b": QWEN3_8B, "qwen3-0.6b": QWEN3_06B}
OPS = ("gate_up", "down", "qkv", "o")
LAYERS = 6
MAX_ACCUMULATORS = 160
"""Registers of a thread."""


def candidates(op: str, n: int, k: int, rows: int) -> Iterator[Ring]:
    """Rings that fit, with as many stages as let one or two programs share a multiprocessor."""
    matrices = 2 if op == "gate_up" else 1
    least = 96 if n * k > 1 << 23 else 32
    for swap in (True, False):
        for block_n in (64, 128) if swap else (16, 32, 64, 128, 256):
            for warps in (4, 8):
                across = block_n if swap else rows
                too_many = matrices * block_n * rows > MAX_ACCUMULATORS * 32 * warps
                if across < 16 * warps or too_many:
                    continue
                for block_k in (64, 128):
                    for split in (1, 2, 4) if op in ("o", "down") else (1,):
                        slot = 2 * (matrices * block_n + rows) * block_k
                        depths = {min(8, (share - 2048) // slot) for share in (SHARED_BYTES, 113 << 10)}
                        for stages in sorted(depths, reverse=True):
                            ring = Ring(rows, block_n, block_k, split, stages, swap, warps)
                            programs = n // block_n * split
                            if stages >= 3 and ring.fits(op, n, k) and least <= programs <= (300 if split > 1 else n):
                                yield ring


class Chain:
    """LAYERS layers' products."""

    def __init__(self, sizes: Sizes, rows: int) -> None:
        self.sizes, self.rows, self.shapes = sizes, rows, product_shapes(sizes)
        self.weights = [
            {
                op: torch.randn(2 * n if op == "gate_up" else n, k, device=DEVICE, dtype=BF16) * k**-0.5
                for op, (n, k) in self.shapes.items()
                if op != "head"
            }
            for _ in range(LAYERS)
        ]
        self.stream = ResidualStream.allocate(sizes.hidden, BF16, DEVICE)
        self.stream.gained_mn.normal_()
        self.stream.squares_f.fill_(1.0)
        self.gain = torch.ones(sizes.hidden, device=DEVICE, dtype=BF16)
        self.qkv = torch.empty(rows, self.shapes["qkv"][0], device=DEVICE, dtype=BF16)
        self.attended = torch.randn(rows, self.shapes["o"][1], device=DEVICE, dtype=BF16)
        self.activated = torch.randn(rows, sizes.inner, device=DEVICE, dtype=BF16)
        floats = max(self.shapes[op][0] * rows * 4 for op in ("o", "down"))
        self.split = SplitScratch(
            torch.zeros(floats, device=DEVICE), torch.zeros(sizes.hidden // 16, dtype=torch.int32, device=DEVICE)
        )

    def launch(self, op: str, layer: int, config: Ring, partials: int) -> Launch:
        """One product. `partials`: sums of squares a row that its input has."""
        product = SkinnyLinear(op, self.weights[layer][op], None, {self.rows: config})
        if op == "o":
            return add_residual(product, self.attended, self.stream, self.gain, self.split)
        if op == "down":
            return add_residual(product, self.activated, self.stream, self.gain, self.split)
        y, epilogue = (self.qkv, "store") if op == "qkv" else (self.activated, "silu")
        return scaled_store(product, self.stream, y, partials=partials, epilogue=epilogue, eps=1e-5)

    def launches(self, configs: dict[str, Ring]) -> list[Launch]:
        """All products of all layers in order."""
        parts = {op: self.shapes[op][0] // configs[op].block_n for op in ("o", "down")}
        return [
            self.launch(op, layer, configs[op], parts["down"] if op == "qkv" else parts["o"])
            for layer in range(LAYERS)
            for op in ("qkv", "o", "gate_up", "down")
        ]

    def error(self, op: str, config: Ring) -> float:
        """Of one product against torch's."""
        weight = self.weights[0][op].float()
        if op in ("o", "down"):
            x = self.attended if op == "o" else self.activated
            self.stream.residual_mn.fill_(0.5)
            self.launch(op, 0, config, 0).run()
            return relative_error(self.stream.residual_mn[: self.rows] - 0.5, x.float() @ weight.T)
        x = self.stream.gained_mn[: self.rows].float()
        self.stream.squares_f.fill_(1.0)
        self.launch(op, 0, config, 1).run()
        product = x @ weight.T * torch.rsqrt(torch.tensor(1.0 / x.shape[1] + 1e-5))
        if op == "gate_up":
            gate, up = product.chunk(2, 1)
            product = torch.nn.functional.silu(gate) * up
        return relative_error(self.qkv if op == "qkv" else self.activated, product)

    def time_us(self, configs: dict[str, Ring]) -> float:
        """us a layer."""
        launches = self.launches(configs)
        graph = capture(lambda: [launch.run() for launch in launches])
        return 1e3 * time_ms(graph, repeats=7, inner=3) / LAYERS


def tune_chain(report: Report, sizes: Sizes, rows: int, ops: list[str], deadline: float) -> dict[str, Any]:
    """Coordinate descent; (op, config) -> us a layer beside the best of the others."""
    chain = Chain(sizes, rows)
    found = {op: SkinnyLinear.make(op, chain.weights[0][op], None).configs[rows] for op in OPS}
    best = {op: config for op, config in found.items() if isinstance(config, Ring)}
    assert len(best) == len(OPS)
    tried = {op: list(dict.fromkeys([best[op], *candidates(op, *chain.shapes[op], rows)])) for op in ops}
    kernels = [chain.launch(op, 0, config, 1) for op in ops for config in tried[op]]
    kernels += [launch for op in ops for c in tried[op] for launch in chain.launches(best | {op: c})[:4]]
    report.say(f"{rows} rows: {compile_together(kernels)} kernels compiled")
    first_us = best_us = chain.time_us(best)
    times: dict[str, list[tuple[float, tuple[Any, ...]]]] = {}
    for turn, op in enumerate(ops):
        end = time.perf_counter() + (deadline - time.perf_counter()) / (len(ops) - turn)
        for config in tried[op]:
            if time.perf_counter() > end:
                report.say(f"{op}: out of time after {len(times.get(op, []))} of {len(tried[op])}")
                break
            report.check(f"{op} {config}", chain.error(op, config), 8e-3)
            us = chain.time_us(best | {op: config})
            times.setdefault(op, []).append((round(us, 2), astuple(config)))
            if us < best_us - 0.05:
                best, best_us = best | {op: config}, us
    return {"rows": rows, "first_us": first_us, "best_us": best_us, "best": best, "times": times}


def tune_head(report: Report, sizes: Sizes, rows: int, deadline: float) -> dict[str, Any]:
    """The head alone, and torch's product."""
    n, k = product_shapes(sizes)["head"]
    weight = torch.randn(n, k, device=DEVICE, dtype=BF16) * k**-0.5
    x, y = torch.randn(rows, k, device=DEVICE, dtype=BF16), torch.empty(rows, n, device=DEVICE)
    stream = ResidualStream.allocate(k, BF16, DEVICE)
    table = SkinnyLinear.make("head", weight, None).configs[rows]
    configs = list(dict.fromkeys([table, *candidates("head", n, k, rows)]))
    launches = [store(SkinnyLinear("head", weight, None, {rows: c}), x, y, stream) for c in configs]
    report.say(f"head, {rows} rows: {compile_together(launches)} kernels compiled")
    expected = x.float() @ weight.float().T
    times = []
    for config, launch in zip(configs, launches, strict=True):
        if time.perf_counter() > deadline:
            report.say(f"head: out of time after {len(times)} of {len(configs)}")
            break
        launch.run()
        report.check(f"head {config}", relative_error(y, expected), 8e-3)
        times.append((round(1e3 * time_ms(capture(launch.run), 5, 3), 1), astuple(config)))
    wide = 1e3 * time_ms(capture(lambda: torch.mm(x, weight.T, out_dtype=torch.float32)), 5, 3)
    half = 1e3 * time_ms(capture(lambda: torch.mm(x, weight.T)), 5, 3)
    return {"rows": rows, "first_us": times[0][0], "torch_fp32_us": wide, "torch_bf16_us": half, "times": times}


def print_chain(found: dict[str, Any]) -> None:
    print(f"{found['rows']} rows: {found['first_us']:.1f} -> {found['best_us']:.1f} us a layer")
    for op, times in found["times"].items():
        print(f"  {op:8s} {found['best'][op]}; table's {times[0][0]:.1f}; " + "; ".join(map(str, sorted(times)[:5])))
    found["best"] = {op: astuple(config) for op, config in found["best"].items()}


def print_head(found: dict[str, Any]) -> None:
    print(
        f"head, {found['rows']} rows: table's {found['first_us']:.0f} us, torch {found['torch_fp32_us']:.0f} (fp32 out)"
        f" {found['torch_bf16_us']:.0f} (bf16); " + "; ".join(map(str, sorted(found["times"])[:6]))
    )


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--rows", default="128")
    parser.add_argument("--ops", default="gate_up,down,qkv,o,head")
    parser.add_argument("--budget", type=float, default=90.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    report, sizes = Report(), MODELS[args.model]
    ops = [op for op in args.ops.split(",") if op != "head"]
    counts = [int(rows) for rows in args.rows.split(",")]
    chains, heads = [], []
    for i, rows in enumerate(counts):
        left = args.budget - (time.perf_counter() - report.started)
        share = time.perf_counter() + left / (len(counts) - i)
        if ops:
            chains.append(tune_chain(report, sizes, rows, ops, share - (left / 5 if "head" in args.ops else 0)))
            torch.cuda.empty_cache()
        if "head" in args.ops:
            heads.append(tune_head(report, sizes, rows, share))
            torch.cuda.empty_cache()
    print(f"{args.model}:")
    for found in chains:
        print_chain(found)
    for found in heads:
        print_head(found)
    print(f"{len(report.failures)} failures; {time.perf_counter() - report.started:.0f} s")
    if args.out:
        args.out.write_text(json.dumps({"chains": chains, "heads": heads, "failures": report.failures}, indent=1))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
