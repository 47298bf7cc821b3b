"""Experts in e4m3 on a Hopper GPU, at Qwen3-30B-A3B's shape: numerics against fp32 with rows rounded where the kernels
round them, and time of the block beside the ceilings.

    PYTHONPATH=python python tests/kernels/gpu_moe_fp8.py --out moe_fp8.json [--parts numerics,block,variants]

"variants" (not run by default) times other tiles (kernels/triton/moe_table.py). Prints every failure as it is found;
the exit code is 1 if anything failed. `tests/run` does not run it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from fused_steps import relative_error
from gpu_moe import (
    BF16,
    DEVICE,
    EPS,
    NUM_EXPERTS,
    SIZES,
    TILE_ROWS,
    TOP_K,
    DecodeCase,
    make_experts,
    print_table,
    run,
    time_block,
    time_variants,
)
from gpu_report import Part, Report, run_parts
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.reference.moe import experts as reference_experts
from octavo.kernels.reference.moe import route
from octavo.kernels.reference.quantize_rows import FP8, dequantize_rows, quantize_rows
from octavo.kernels.reference.squares import SIDE, dequantize_squares
from octavo.kernels.triton import moe
from octavo.kernels.triton.launch import compile_together
from octavo.kernels.triton.moe_experts import Experts, ExpertScales
from octavo.kernels.triton.moe_table import SHARED_BYTES, Tile, tiles_for
from octavo.kernels.triton.skinny_table import MAX_ROWS, bucket_for

FORMS = ("channels", "squares")
ROWS = (1, 2, 8, 33, 128, 129, 600, 2048)


def make_eight(form: str) -> Experts:
    """A layer with scales of "channels" or "squares"."""
    plain = make_experts()
    kept: list[tuple[Tensor, Tensor]] = []
    for matrix in (plain.gate_up_e2ih, plain.down_ehi):
        if form == "channels":
            number, scale = quantize_rows(matrix.flatten(0, 1))
            kept.append((number.view(matrix.shape), scale.view(matrix.shape[:2])))
        else:
            squares = matrix.unflatten(1, (-1, SIDE)).unflatten(-1, (-1, SIDE))
            scale = squares.abs().amax((2, 4)).float() / 448
            number = (squares / scale[:, :, None, :, None]).to(FP8).view(matrix.shape)
            kept.append((number, scale.contiguous()))
    (gate_up, first), (down, second) = kept
    scales = ExpertScales(first, second, SIDE if form == "squares" else 0)
    return replace(plain, gate_up_e2ih=gate_up, down_ehi=down, scales=scales)


def widened(experts: Experts) -> tuple[Tensor, Tensor]:
    """What the numbers stand for, fp32."""
    assert experts.scales is not None
    pairs = (experts.gate_up_e2ih, experts.scales.gate_up), (experts.down_ehi, experts.scales.down)
    if experts.block:
        first, second = (dequantize_squares(*pair) for pair in pairs)
    else:
        first, second = (dequantize_rows(n.flatten(0, 1), s.flatten()).view(n.shape) for n, s in pairs)
    return first, second


def rounded(x: Tensor, group: int) -> Tensor:
    """Rows with a scale for every `group` features."""
    return dequantize_rows(*quantize_rows(x.reshape(-1, group))).view(x.shape)


def expected_of(experts: Experts, matrices: tuple[Tensor, Tensor], x: Tensor, logit_me: Tensor, bucket: int) -> Tensor:
    """fp32 products of rounded rows."""
    by_group = partial(rounded, group=experts.tiles(bucket)["gate_up"].block_n)
    routed = route(logit_me, TOP_K, True)
    return reference_experts(rounded(x, x.shape[1]), *routed, *matrices, round_inner=by_group)


@torch.inference_mode()
def check_form(report: Report, form: str) -> None:
    experts = make_eight(form)
    matrices = widened(experts)
    decodes = {rows: DecodeCase.make(experts, rows) for rows in ROWS if rows <= MAX_ROWS}
    inputs = {rows: torch.randn(rows, SIZES.hidden, device=DEVICE).to(BF16) for rows in ROWS}
    logits = {rows: F.linear(x, experts.router_eh) for rows, x in inputs.items()}
    outs = {rows: torch.full_like(x, torch.nan) for rows, x in inputs.items()}
    prompts = {rows: moe.forward(experts, inputs[rows], logits[rows], outs[rows]) for rows in ROWS}
    kernels = chain(*prompts.values(), *(case.launches(experts) for case in decodes.values()))
    report.say(f"{form}: {compile_together(kernels)} kernels compiled")
    for rows, launches in prompts.items():
        run(launches)
        expected = expected_of(experts, matrices, inputs[rows].float(), logits[rows], rows)
        report.check(f"{form}, prompt {rows} rows", relative_error(outs[rows], expected), 1.5e-2)
    for rows, case in decodes.items():
        before, gained = case.stream.residual_mn[:rows].float(), case.stream.gained_mn[:rows].float()
        scale = torch.rsqrt(before.square().mean(1, keepdim=True) + EPS)
        run(case.launches(experts))
        logit_me = F.linear(gained, experts.router_eh.float()) * scale
        if rows == 1:  # stays in bf16
            expected = reference_experts(gained * scale, *route(logit_me, TOP_K, True), *matrices)
        else:
            expected = expected_of(experts, matrices, gained * scale, logit_me, bucket_for(rows))
        found = case.stream.residual_mn[:rows]
        report.check(f"{form}, decode {rows} rows", relative_error(found, before + expected), 8e-3)


def check_numerics(report: Report) -> None:
    for form in FORMS:
        check_form(report, form)
        torch.cuda.empty_cache()


def time_blocks(report: Report) -> None:
    for form in FORMS:
        report.say(f"scales of {form}:")
        time_block(report, partial(make_eight, form))
        torch.cuda.empty_cache()


SMALL_GATE_UP = [(128, 128, 2, 4), (128, 128, 3, 4), (128, 128, 4, 4), (64, 128, 4, 4), (64, 128, 6, 4)]
SMALL_DOWN = [(128, 5, 4), (128, 4, 4), (64, 6, 4), (64, 8, 4), (128, 3, 4), (256, 4, 4), (256, 3, 8)]
LARGE_GATE_UP = [(128, 128, 3, 8), (128, 128, 2, 8), (64, 128, 4, 8), (64, 128, 4, 4), (128, 128, 4, 8)]
LARGE_DOWN = [(128, 4, 8), (128, 3, 8), (128, 5, 8), (256, 3, 8), (128, 4, 4), (64, 5, 4)]
"""As above; the second product's block k is the first one's block n."""


def eight_variants(rows: int) -> list[dict[str, Tile]]:
    """Of experts in e4m3: candidates of each product beside the default of the other."""
    found = [tiles_for(rows * TOP_K / NUM_EXPERTS, SIZES.hidden, SIZES.inner, 1)]
    for block_m in TILE_ROWS[rows]:
        swap = block_m < 64
        firsts, seconds = (SMALL_GATE_UP, SMALL_DOWN) if swap else (LARGE_GATE_UP, LARGE_DOWN)
        gate_ups = [Tile(block_m, *sizes, swap) for sizes in firsts]
        for i, gate_up in enumerate(gate_ups):
            downs = [Tile(block_m, n, gate_up.block_n, *rest, swap) for n, *rest in seconds]
            found += [{"gate_up": gate_up, "down": down} for down in (downs[:1] if i else downs)]
    fits = [t for t in found if all(tile.shared_bytes(op, 1) + 2048 <= SHARED_BYTES for op, tile in t.items())]
    return list({str(tiles): tiles for tiles in fits}.values())


def time_all_variants(report: Report) -> None:
    time_variants(report, partial(make_eight, "channels"), eight_variants)


PARTS: dict[str, list[Part]] = {
    "numerics": [check_numerics],
    "block": [time_blocks],
    "variants": [time_all_variants],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="numerics,block")
    parser.add_argument("--budget", type=float, default=85.0, help="seconds after which no further part is begun")
    parser.add_argument("--variant-rows", default=",".join(map(str, TILE_ROWS)), help="numbers of rows of variants")
    options = parser.parse_args()
    for rows in [rows for rows in TILE_ROWS if str(rows) not in options.variant_rows.split(",")]:
        del TILE_ROWS[rows]
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report()
    run_parts(report, PARTS, options.parts, options.out, budget_s=options.budget)
    print_table(report.results)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
