"""What cuBLAS makes of the products of a prompt step on this GPU: in a burst and for long, in one piece and in several.

    PYTHONPATH=python python tests/kernels/gpu_matmul.py --out matmul.json

The products of Llama-3.1-8B's layers in turn, LAYERS sets of weights, as one CUDA graph, with the rows of a step cut
into pieces of some size. TFLOP/s of a burst after a second of rest, and at the end of a run of seconds, with the clock
and the power that nvidia-smi shows then. No check: `tests/run` does not run this.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from gpu_report import capture, time_ms
from torch import Tensor

from octavo.kernels.triton.rms_norm import add_parts_rms_norm, add_rms_norm, rms_norm

DEVICE = torch.device("cuda")
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""(n, k)"""
LAYERS = 4
LONG_S = 2.5
CASES = ((8192, 8192), (8192, 4096), (8192, 2048), (4096, 4096), (4096, 2048), (2048, 2048), (16384, 16384))
"""(rows of a step, rows of a piece)."""
SIZES = (*range(256, 641, 32), 704, 768, 896, 1024, 1152, 1280, 1408, 1536, 1792, 2048)


def clocks() -> str:
    """SM clock in MHz, power in W, why clocks are held back."""
    query = "--query-gpu=clocks.sm,power.draw,clocks_throttle_reasons.active"
    command = ["nvidia-smi", "-i", "0", query, "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def multiply(rows: int, piece: int, weights: list[list[Tensor]], scale: float) -> torch.cuda.CUDAGraph:
    """All layers' products as a graph."""
    inputs = {k: (torch.randn(rows, k, device=DEVICE) * scale).bfloat16() for _, k in SHAPES}
    outputs = {n: torch.empty(rows, n, device=DEVICE, dtype=torch.bfloat16) for n, _ in SHAPES}

    def run() -> None:
        for layer in weights:
            for weight, (n, k) in zip(layer, SHAPES, strict=True):
                for start in range(0, rows, piece):
                    part = slice(start, start + piece)
                    torch.mm(inputs[k][part], weight.t(), out=outputs[n][part])

    return capture(run)


def seconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Of one replay, on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats / 1e3


def residual_us(rows: int, weights: list[list[Tensor]], *, is_added: bool) -> float:
    """Of a layer's o and down products with what follows them: the residual addition in the norm's kernel, or in the
    product (`is_added`)."""
    gain = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    residual = torch.zeros(rows, 4096, device=DEVICE, dtype=torch.bfloat16)
    inputs = {k: torch.randn(rows, k, device=DEVICE).bfloat16() * 0.01 for k in (4096, 14336)}

    def run() -> None:
        for layer in weights:
            for weight in (layer[1], layer[3]):
                x = inputs[weight.shape[1]]
                if is_added:
                    torch.addmm(residual, x, weight.t(), out=residual)
                    rms_norm(residual, gain, 1e-5, pdl=True)
                else:
                    add_rms_norm(torch.mm(x, weight.t()), residual, gain, 1e-5, pdl=True)

    return 1e3 * time_ms(capture(run)) / len(weights)


def in_parts_us(rows: int, weights: list[list[Tensor]], which: int, parts: int) -> float:
    """Of a layer's o (1) or down (3) product with the norm after it: by cuBLAS as it is (parts 0), or as products of
    parts of k in fp32, which the norm's kernel adds up."""
    gain = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    residual = torch.zeros(rows, 4096, device=DEVICE, dtype=torch.bfloat16)
    k = SHAPES[which][1]
    x = torch.randn(rows, k, device=DEVICE).bfloat16() * 0.01

    def run() -> None:
        for layer in weights:
            weight = layer[which]
            if parts:
                x_ptk = x.view(rows, parts, -1).transpose(0, 1)
                weight_pkn = weight.view(4096, parts, -1).permute(1, 2, 0)
                product = torch.bmm(x_ptk, weight_pkn, out_dtype=torch.float32)
                add_parts_rms_norm(product, residual, gain, 1e-5, pdl=True)
            else:
                add_rms_norm(torch.mm(x, weight.t()), residual, gain, 1e-5, pdl=True)

    return 1e3 * time_ms(capture(run)) / len(weights)


def by_parts(weights: list[list[Tensor]]) -> None:
    """Decode steps of more rows than the skinny products take."""
    for rows in (160, 192, 224, 256, 384, 512):
        for name, which in (("o", 1), ("down", 3)):
            found = {parts: round(in_parts_us(rows, weights, which, parts), 1) for parts in (0, 1, 2, 4)}
            print(f"{rows} rows, {name} with its norm, us by parts of k (0: as it is): {found}", flush=True)


def by_sizes(weights: list[list[Tensor]]) -> None:
    """us of each product by rows: which sizes cuBLAS has no good kernel for."""
    print(f"{'rows':>5}" + "".join(f" {n:>6} x {k:<6}" for n, k in SHAPES))
    for rows in SIZES:
        times = []
        for which, (n, k) in enumerate(SHAPES):
            x = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16)
            y = torch.empty(rows, n, device=DEVICE, dtype=torch.bfloat16)
            graph = capture(lambda: [torch.mm(x, layer[which].t(), out=y) for layer in weights])  # noqa: B023
            times.append(1e3 * time_ms(graph, 5, 5) / LAYERS)
        print(f"{rows:5}" + "".join(f" {us:12.1f}  " for us in times), flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", action="store_true", help="only: o and down in parts of k")
    parser.add_argument("--sizes", action="store_true", help="only: each product at many numbers of rows")
    args = parser.parse_args()
    weights = [[torch.randn(n, k, device=DEVICE).bfloat16() * k**-0.5 for n, k in SHAPES] for _ in range(LAYERS)]
    if args.parts:
        by_parts(weights)
        return
    if args.sizes:
        by_sizes(weights)
        return
    results: list[dict[str, Any]] = []
    for rows, piece in CASES:
        graph = multiply(rows, piece, weights, 1.0)
        flop = 2.0 * rows * sum(n * k for n, k in SHAPES) * LAYERS
        time.sleep(1.0)
        burst_s = seconds(graph, 1)
        for _ in range(2):
            for _ in range(int(LONG_S / 2 / burst_s)):
                graph.replay()
            busy = clocks()  # the device is still at work
            torch.cuda.synchronize()
        long_s = seconds(graph, max(1, int(0.3 / burst_s)))
        row = {"rows": rows, "piece": piece, "burst": flop / burst_s / 1e12, "long": flop / long_s / 1e12}
        results.append(row | {"clocks": busy})
        print(f"{rows} rows in pieces of {piece}: {row['burst']:.0f} TFLOP/s, for long {row['long']:.0f}; {busy}")
    for rows in (192, 256, 512, 2048, 8192):
        row = {"rows": rows, "apart_us": residual_us(rows, weights, is_added=False)}
        row["added_us"] = residual_us(rows, weights, is_added=True)
        results.append(row)
        print(
            f"{rows} rows, o and down with norms: {row['apart_us']:.1f} us, added in the product {row['added_us']:.1f}"
        )
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
