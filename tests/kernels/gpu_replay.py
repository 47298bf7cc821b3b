"""Attention of decode steps as a CUDA graph, replayed 100,000 times for random plans on a Hopper GPU.

    PYTHONPATH=python python tests/kernels/gpu_replay.py --out replay.json [--replays 100000]

Each replay draws new lengths and slots on the device, attends split over programs (fused kernel and paged kernel) and
unsplit, and keeps the greatest relative error between them and whether a repetition gave other bits: a race between
programs of a row, or between dependent launches, would show. The exit code is 1 if one did; `tests/run` does not run
this.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fused_steps import AttentionCase, make_attention
from gpu_report import Report
from torch import Tensor

from octavo.kernels.triton import decode_attention_launches as fused
from octavo.kernels.triton.decode_attention_launches import AttentionScratch, DecodeRows, HeadShape
from octavo.kernels.triton.launch import Launch, compile_together
from octavo.kernels.triton.paged_decode import paged_decode, plan_decode

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
LONGEST = 2000
SPARE = 3
"""Slots that no row of a step has."""
CASES = {
    "llama 1": (HeadShape(32, 8, 128), 1),
    "llama 3": (HeadShape(32, 8, 128), 3),
    "llama 8": (HeadShape(32, 8, 128), 8),
    "qwen3-30b 5": (HeadShape(32, 4, 128), 5),
    "smollm2 4": (HeadShape(9, 3, 64), 4),
}
"""Heads, and rows; few enough of them that rows are split."""


def attention(case: AttentionCase, splits: int | None) -> tuple[list[Launch], Tensor]:
    """The fused kernels with so many splits (None: their own choice), and their output."""
    heads, rows = case.heads, case.rows
    out = torch.zeros(rows.num_rows, heads.num_heads * heads.head_dim, device=DEVICE, dtype=BF16)
    choose = fused.choose_splits
    if splits is not None:
        fused.choose_splits = lambda *_: splits
    try:
        scratch = AttentionScratch.allocate(heads, 16, DEVICE)
        return fused.attend(case.layer, case.qkv_ro, case.kv_cache, rows, scratch, out), out
    finally:
        fused.choose_splits = choose


def paged(case: AttentionCase, *, is_split: bool) -> tuple[Callable[[], None], Tensor]:
    """The paged kernel over the same cache, with queries of its own."""
    heads, rows = case.heads, case.rows
    q = torch.randn(rows.num_rows, heads.num_heads, heads.head_dim, device=DEVICE, generator=GENERATOR).to(BF16)
    GENERATOR.manual_seed(5)
    out = torch.zeros_like(q)
    plan = plan_decode(rows.num_rows, heads.num_heads, heads.num_kv_heads, heads.head_dim, 2, LONGEST)
    if not is_split:
        plan = replace(plan, splits=1, least=1)
    part, stat = (
        torch.zeros(max(1, size), device=DEVICE) for size in plan.scratch_sizes(rows.num_rows, heads.num_kv_heads)
    )

    def run() -> None:
        paged_decode(
            q, case.kv_cache, rows.block_table_sb, rows.row_slot_r, rows.kv_len_r, out, plan, part, stat,
            num_rows=rows.num_rows, scale=heads.head_dim**-0.5, window=0, soft_cap=0.0,
        )  # fmt: skip

    return run, out


def error(actual: Tensor, expected: Tensor) -> Tensor:
    return (actual.float() - expected.float()).norm() / expected.float().norm()


def replay(report: Report, name: str, heads: HeadShape, count: int, replays: int) -> None:
    """One case's replays."""
    case = make_attention([LONGEST] * (count + SPARE), heads, dtype=BF16, device="cuda", seed=count)
    slots = case.rows.row_slot_r.clone()  # each with blocks of its own
    rows = DecodeRows(case.rows.block_table_sb, slots[:count].clone(), case.rows.kv_len_r[:count].clone(), LONGEST)
    case = replace(case, rows=rows, qkv_ro=case.qkv_ro[:count])
    split, split_out = attention(case, None)
    whole, whole_out = attention(case, 1)
    report.check(f"{name}: kernels of a split step", -float(len(split)), -1.5)
    paged_split, paged_out = paged(case, is_split=True)
    paged_whole, paged_whole_out = paged(case, is_split=False)
    compile_together([*split, *whole])
    worst, differing = torch.zeros(2, device=DEVICE), torch.zeros((), device=DEVICE)

    def step() -> None:
        rows.kv_len_r.copy_(torch.randint(1, LONGEST + 1, (count,), device=DEVICE))
        rows.row_slot_r.copy_(slots[torch.rand(len(slots), device=DEVICE).argsort()[:count]])
        for launch in split:
            launch.run()
        first = split_out.clone()
        for launch in split:
            launch.run()
        differing.add_((first != split_out).any())
        for launch in whole:
            launch.run()
        paged_split()
        paged_whole()
        found = torch.stack((error(first, whole_out), error(paged_out, paged_whole_out)))
        worst.copy_(torch.maximum(worst, torch.where(found == found, found, float("inf"))))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    begun = time.perf_counter()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    us = 1e6 * (time.perf_counter() - begun) / replays
    report.say(f"{name}: {replays} replays of {us:.0f} us; worst errors fused, paged {worst.tolist()}")
    report.check(f"{name}: fused against unsplit", worst[0].item(), 8e-3)
    report.check(f"{name}: paged against unsplit", worst[1].item(), 8e-3)
    report.check(f"{name}: repetitions that differ", differing.item(), 0.5)


GENERATOR: Any = None


@torch.inference_mode()
def main() -> int:
    global GENERATOR
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    GENERATOR = torch.Generator(device=DEVICE).manual_seed(5)
    report = Report()
    for name, (heads, count) in CASES.items():
        replay(report, name, heads, count, args.replays // len(CASES))
    print(f"{len(report.failures)} failures; seed {args.seed}; {time.perf_counter() - report.started:.0f} s")
    if args.out:
        args.out.write_text(json.dumps({"failures": report.failures, "results": report.results}, indent=1))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
