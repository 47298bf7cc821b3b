"""Decode attention of rows that share blocks, checked and timed on a Hopper GPU.

    PYTHONPATH=python python tests/kernels/gpu_shared.py --out shared.json

Checks the kernels of shared_attention.py in bf16 and e4m3 against the same step without them. Then times a layer's
attention with and without them (CUDA graph, LAYERS caches in turn, medians), with further configurations of the kernel
for the largest. The exit code is 1 if a check failed; `tests/run` does not run this.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fused_models import LLAMA_8B, QWEN3_06B, QWEN3_30B_A3B, Sizes
from fused_steps import AttentionCase, make_attention, relative_error
from gpu_report import Report, capture, time_ms
from torch import Tensor

from octavo.kernels.reference.kv_write import kept
from octavo.kernels.reference.quantize_rows import FP8
from octavo.kernels.triton import shared_attention
from octavo.kernels.triton.decode_attention_launches import TILE, AttentionScratch, HeadShape, attend
from octavo.kernels.triton.launch import Launch, compile_together
from octavo.kernels.triton.shared_attention import SharedConfig

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
LAYERS = 8
OWN = 96
"""Tokens of a row that are its own, where times are taken."""
TIMED = [(16, 4096), (32, 2048), (64, 512), (64, 2048), (128, 2048), (256, 64), (256, 512), (256, 2048), (256, 8192)]
"""(rows, shared tokens)."""
CONFIGS = [
    SharedConfig(64, 4, 2), SharedConfig(64, 4, 4), SharedConfig(128, 8, 2), SharedConfig(128, 8, 3),
    SharedConfig(128, 4, 2),
]  # fmt: skip
PROGRAMS = (128, 512)
"""Values of `NUM_PROGRAMS` that are tried."""


def make(sizes: Sizes, rows: int, shared: int, own: int, *, others: int = 0) -> AttentionCase:
    """`rows` rows of `shared` tokens and up to `own` more, `others` rows of up to 300 tokens among them."""
    heads = HeadShape(sizes.heads, sizes.kv_heads, sizes.head_dim)
    lengths = [shared + 1 + i * 37 % own for i in range(rows)]
    for i in range(others):
        lengths.insert(3 * i + 1, 1 + i * 53 % 300)
    sharing = [i for i, length in enumerate(lengths) if length > shared]
    return make_attention(
        lengths, heads, qk_norm=sizes.qk_norm, dtype=BF16, device="cuda", seed=rows + shared, sharing=sharing,
        num_shared=shared // TILE,
    )  # fmt: skip


def launches_of(case: AttentionCase, cache: Tensor, *, together: bool) -> tuple[list[Launch], Tensor]:
    """A layer's attention, and its output."""
    heads, rows = case.heads, case.rows if together else replace(case.rows, shared_2=None)
    out = torch.full((rows.num_rows, heads.num_heads * heads.head_dim), torch.nan, device=DEVICE, dtype=BF16)
    scratch = AttentionScratch.allocate(heads, rows.num_rows, DEVICE)
    return attend(case.layer, case.qkv_ro, cache, rows, scratch, out), out


def check(report: Report) -> None:
    made = []
    for sizes in (LLAMA_8B, QWEN3_06B, QWEN3_30B_A3B):
        for rows, shared, others in ((20, 128, 0), (16, 2048, 5), (100, 640, 28), (250, 2048, 6)):
            case = make(sizes, rows, shared, 200, others=others)
            for dtype in (BF16, FP8):
                cache = kept(case.kv_cache, dtype)
                pair = [launches_of(case, cache, together=together) for together in (True, False)]
                name = f"{sizes.heads}/{sizes.kv_heads} heads, {rows} rows of {shared} + {others} others, {dtype}"
                made.append((name, pair))
    compile_together(launch for _, pair in made for launches, _ in pair for launch in launches)
    for name, pair in made:
        for launches, _ in pair:
            for launch in launches:
                launch.run()
        report.check(name, relative_error(pair[0][1], pair[1][1]), 8e-3)
        first = pair[0][1].clone()
        for launch in pair[0][0]:
            launch.run()
        report.check(f"{name}: numbers that differ when repeated", int((first != pair[0][1]).sum()), 0.5)


def time_us(case: AttentionCase, caches: list[Tensor], *, together: bool) -> float:
    """Of one layer."""
    launches = [launch for cache in caches for launch in launches_of(case, cache, together=together)[0]]
    compile_together(launches)
    return 1e3 * time_ms(capture(lambda: [launch.run() for launch in launches])) / len(caches)


def compile_all() -> None:
    """Everything that `time_all` runs, at once."""
    launches: list[Launch] = []
    for rows, shared in TIMED:
        case = make(LLAMA_8B, rows, TILE, 1)
        case.rows = replace(case.rows, max_kv_len=shared + OWN)
        launches += launches_of(case, case.kv_cache, together=False)[0]
        for _ in variants():
            launches += launches_of(case, case.kv_cache, together=True)[0]
    compile_together(launches)


def variants() -> Iterator[str]:
    """Sets one after the other, and names it; the usual one first."""
    usual, programs = shared_attention.CONFIG, shared_attention.NUM_PROGRAMS
    for config in (usual, *CONFIGS):
        for number in (programs, *PROGRAMS):
            shared_attention.CONFIG, shared_attention.NUM_PROGRAMS = config, number
            yield f"{config.pairs}/{config.num_warps}/{config.num_stages} programs {number}"
    shared_attention.CONFIG, shared_attention.NUM_PROGRAMS = usual, programs


def time_all(report: Report) -> list[dict[str, Any]]:
    times: list[dict[str, Any]] = []
    for rows, shared in TIMED:
        case = make(LLAMA_8B, rows, shared, OWN)
        caches = [case.kv_cache.clone() for _ in range(LAYERS if case.kv_cache.nbytes < 2 << 30 else 3)]
        row: dict[str, Any] = {"rows": rows, "shared": shared}
        row["alone_us"] = time_us(case, caches, together=False)
        row["together_us"] = time_us(case, caches, together=True)
        if rows >= 64 and shared >= 512:
            row["variants"] = tried = {name: time_us(case, caches, together=True) for name in variants()}
            best = min(tried, key=lambda name: tried[name])
            row["best"] = f"{best}: {tried[best]:.1f} us"
        case.rows = replace(case.rows, shared_2=torch.zeros(2, dtype=torch.int32, device=DEVICE))
        row["nothing_shared_us"] = time_us(case, caches, together=True)
        times.append(row)
        shown = {name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()}
        report.say(str({name: value for name, value in shown.items() if name != "variants"}))
        del case, caches
        torch.cuda.empty_cache()
    return times


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = Report()
    check(report)
    report.say("checked")
    compile_all()
    report.say("compiled")
    times = time_all(report)
    report.save(args.out, times=times)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
