"""Experts without gates (Nemotron 3 Nano's: 128 of 2688 -> 1856 -> 2688, relu^2, 6 a token) on a Hopper GPU: numerics
in bf16 and e4m3, and time.

    PYTHONPATH=python python tests/kernels/gpu_moe_ungated.py --out moe_ungated.json

Prints every failure as it is found; the exit code is 1 if anything failed. `tests/run` does not run it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from fused_steps import relative_error
from gpu_report import Report, capture, run_parts, time_ms
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.reference.moe import experts as reference_experts
from octavo.kernels.reference.moe import route
from octavo.kernels.reference.quantize_rows import dequantize_rows, quantize_rows
from octavo.kernels.triton import moe
from octavo.kernels.triton.launch import compile_together
from octavo.kernels.triton.moe_experts import Experts, ExpertScales

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
NUM_EXPERTS, TOP_K, WIDTH, INNER = 128, 6, 2688, 1856
ROWS = (1, 8, 32, 256, 2048, 8192)
CHAIN = 4
"""Layers in a timed chain: none finds its weights in the L2 cache."""
READ_BYTES_PER_S = 4.57e12
FLOP_PER_S = {2: 794e12, 1: 1461e12}
"""Measured, by the bytes of a number."""


def make_experts(*, is_eight: bool) -> Experts:
    """One layer, random."""

    def matrix(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=BF16, device=DEVICE).normal_(0, shape[-1] ** -0.5)

    router, matrices = 2 * matrix(NUM_EXPERTS, WIDTH), [matrix(NUM_EXPERTS, INNER, WIDTH)]
    matrices.append(matrix(NUM_EXPERTS, WIDTH, INNER))
    plain = Experts(router, matrices[0], matrices[1], TOP_K, True, activation="relu2", is_gated=False)
    if not is_eight:
        return plain
    (up, first), (down, second) = (quantize_rows(x.flatten(0, 1)) for x in matrices)
    scales = ExpertScales(first.view(NUM_EXPERTS, INNER), second.view(NUM_EXPERTS, WIDTH))
    return replace(plain, gate_up_e2ih=up.view_as(matrices[0]), down_ehi=down.view_as(matrices[1]), scales=scales)


def expected_of(experts: Experts, x_mh: Tensor, logit_me: Tensor) -> Tensor:
    """fp32 products, in e4m3 of rounded rows."""
    routed = route(logit_me, TOP_K, True)
    how = {"activation": "relu2", "is_gated": False}
    if experts.scales is None:
        return reference_experts(x_mh.float(), *routed, experts.gate_up_e2ih, experts.down_ehi, **how)

    def widened(number: Tensor, scale: Tensor) -> Tensor:
        return dequantize_rows(number.flatten(0, 1), scale.flatten()).view(number.shape)

    def rounded(x: Tensor, group: int) -> Tensor:
        return dequantize_rows(*quantize_rows(x.reshape(-1, group))).view(x.shape)

    scales, group = experts.scales, experts.tiles(len(x_mh))["gate_up"].block_n
    matrices = widened(experts.gate_up_e2ih, scales.gate_up), widened(experts.down_ehi, scales.down)
    by_group = partial(rounded, group=group)
    return reference_experts(rounded(x_mh.float(), WIDTH), *routed, *matrices, round_inner=by_group, **how)


@torch.inference_mode()
def check(report: Report, *, is_eight: bool) -> None:
    """Numbers, then times of one layer."""
    kind, layers = "e4m3" if is_eight else "bf16", [make_experts(is_eight=is_eight) for _ in range(CHAIN)]
    inputs = {rows: torch.randn(rows, WIDTH, device=DEVICE).to(BF16) for rows in ROWS}
    logits = {rows: F.linear(x, layers[0].router_eh) for rows, x in inputs.items()}
    outs = {rows: torch.full_like(x, torch.nan) for rows, x in inputs.items()}
    kernels = [k for rows, x in inputs.items() for k in moe.forward(layers[0], x, logits[rows], outs[rows])]
    report.say(f"{kind}: {compile_together(kernels)} kernels compiled")
    for rows, x_mh in inputs.items():
        found = moe.mix(layers[0], x_mh, logits[rows])
        if rows <= 2048:
            expected = expected_of(layers[0], x_mh, logits[rows])
            report.check(f"{kind}, {rows} rows", relative_error(found, expected), 1.5e-2)

        def forward(x_mh: Tensor = x_mh, logit_me: Tensor = logits[rows]) -> None:
            for layer in layers:
                moe.mix(layer, x_mh, logit_me)

        us = 1e3 * time_ms(capture(forward), 5, 3) / CHAIN
        touched, item = NUM_EXPERTS * (1 - (1 - TOP_K / NUM_EXPERTS) ** rows), 1 if is_eight else 2
        size = 2 * WIDTH * INNER
        floor_us = 1e6 * max(item * touched * size / READ_BYTES_PER_S, 2 * rows * TOP_K * size / FLOP_PER_S[item])
        report.results.append({"kind": kind, "rows": rows, "us": us, "floor_us": floor_us})
        report.say(f"{kind} {rows:5} rows: {us:8.1f} us, {100 * floor_us / us:.0f}% of the ceiling")


PARTS = {"bf16": [partial(check, is_eight=False)], "e4m3": [partial(check, is_eight=True)]}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("moe_ungated.json"))
    parser.add_argument("--parts", default=",".join(PARTS))
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report()
    run_parts(report, PARTS, args.parts, args.out)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
