"""The KV cache in e4m3 on a GPU: what kernels write and read against the references, and time beside a bf16 cache.

    PYTHONPATH=python python tests/kernels/gpu_fp8_kv.py --out fp8_kv.json

The exit code is 1 if something was wrong. `tests/run` does not run it (no test_ prefix).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from fused_models import LLAMA_8B, QWEN3_06B
from fused_steps import make_attention, relative_error
from gpu_report import Report, capture, time_ms
from paged_steps import make_step
from torch import Tensor

from octavo.attention.base import make_backend
from octavo.kernels.reference import rotate_write as reference_rotate
from octavo.kernels.reference.kv_write import kept
from octavo.kernels.triton.decode_attention_launches import AttentionScratch, HeadShape, attend
from octavo.kernels.triton.launch import compile_together
from octavo.kernels.triton.rotate_write import rotate_write

DEVICE = torch.device("cuda")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LAYERS = 8
TIMED = ((1, 1024), (8, 4096), (64, 1024), (64, 4096), (256, 256), (256, 1024))
READ_BYTES_PER_S = 4.57e12


def differing(actual: Tensor, expected: Tensor) -> float:
    """Share of a cache's bytes that differ."""
    return (actual.view(torch.uint8) != expected.view(torch.uint8)).float().mean().item()


def check_paged(report: Report) -> None:
    """Writes of the step's K and V, decode rows and prompts."""
    for window in (0, 200):
        step = make_step(
            [(1, 1), (1, 700), (300, 900), (130, 130), (77, 2000)], heads=32, kv_heads=8, dim=128, block_size=64,
            dtype=BF16, window=window, device="cuda", poison=0.0,
        )  # fmt: skip
        step.k_tgd[3, 0, :5] = 1e4  # saturates
        step.ctx.kv_cache = [kept(step.ctx.kv_cache[0], FP8)]
        inputs = step.spec, step.q_thd, step.k_tgd, step.v_tgd
        contexts = [step.clone_ctx(), step.clone_ctx()]
        out, expected = (
            make_backend(n).attend(*inputs, c) for n, c in zip(("triton", "reference"), contexts, strict=True)
        )
        report.check(f"paged, window {window}", relative_error(out, expected), 8e-3)
        report.check(
            f"paged, window {window}: bytes written", differing(contexts[0].kv_cache[0], contexts[1].kv_cache[0]), 1e-9
        )
    tokens, width = 300, 48 * 128
    qkv = torch.randn(tokens, width, device=DEVICE, dtype=BF16)
    angle = torch.rand(tokens, 64, device=DEVICE) * 6
    angles = torch.cat((angle.cos(), angle.sin()), -1)
    places = torch.randperm(640, device=DEVICE)[:tokens]
    caches = [torch.zeros(10, 2, 8, 64, 128, device=DEVICE, dtype=FP8) for _ in range(2)]
    reference_rotate.rotate_write(qkv, angles, caches[1], places, None, None, num_heads=32, norm_eps=0.0)
    rotate_write(qkv.clone(), angles, caches[0], places, None, None, num_heads=32, norm_eps=0.0, pdl=True)
    # the reference rounds rotated k to bf16 before e4m3: next to a border a number may round to the other side
    report.check("rotate_write: bytes that differ", differing(*caches), 0.03)
    report.check("rotate_write: values", relative_error(*caches), 0.02)


def check_fused(report: Report) -> None:
    """Decode attention that norms, rotates and writes itself."""
    made = []
    for sizes in (LLAMA_8B, QWEN3_06B):
        for lengths in (
            [1],
            [190],
            [5000],
            [1, 64, 65, 700, 1500, 30, 129, 2000],
            [1 + i * 37 % 900 for i in range(64)],
        ):
            heads = HeadShape(sizes.heads, sizes.kv_heads, sizes.head_dim)
            case = make_attention(lengths, heads, qk_norm=sizes.qk_norm, dtype=BF16, device="cuda", seed=len(made))
            case.kv_cache = kept(case.kv_cache, FP8)
            out = torch.full((len(lengths), heads.num_heads * heads.head_dim), torch.nan, device=DEVICE, dtype=BF16)
            scratch = AttentionScratch.allocate(heads, 128, DEVICE)
            made.append((case, out, attend(case.layer, case.qkv_ro, case.kv_cache, case.rows, scratch, out)))
    compile_together(launch for *_, launches in made for launch in launches)
    for case, out, launches in made:
        rows, heads = case.rows, case.heads
        cache = case.kv_cache.clone()
        for launch in launches:
            launch.run()
        expected = case.expected(cache)
        name = f"fused {heads.num_heads}/{heads.num_kv_heads} heads, {rows.num_rows} rows up to {rows.max_kv_len}"
        report.check(name, relative_error(out, expected), 8e-3)
        report.check(f"{name}: cache", relative_error(case.kv_cache, cache), 1e-3)


def time_fused(report: Report) -> list[dict[str, Any]]:
    """us of one layer's attention, LAYERS caches in turn."""
    rows: list[dict[str, Any]] = []
    heads = HeadShape(32, 8, 128)
    for count, length in TIMED:
        row: dict[str, Any] = {"rows": count, "context": length}
        for name, dtype in (("bf16", BF16), ("fp8", FP8)):
            case = make_attention([length] * count, heads, dtype=BF16, device="cuda")
            caches = [kept(case.kv_cache, dtype) for _ in range(LAYERS if count * length < 1 << 17 else 3)]
            scratch = AttentionScratch.allocate(heads, 256, DEVICE)
            out = torch.empty(count, 4096, device=DEVICE, dtype=BF16)
            launches = [k for c in caches for k in attend(case.layer, case.qkv_ro, c, case.rows, scratch, out)]
            compile_together(launches)
            us = 1e3 * time_ms(capture(lambda x=launches: [k.run() for k in x])) / len(caches)
            num_bytes = count * length * 2 * 8 * 128 * dtype.itemsize
            row |= {f"{name}_us": us, f"{name}_share": num_bytes / READ_BYTES_PER_S * 1e6 / us}
            del case, caches
            torch.cuda.empty_cache()
        rows.append(row)
        report.say(
            f"{count} x {length}: bf16 {row['bf16_us']:.1f} us ({100 * row['bf16_share']:.0f}% of bytes),"
            f" fp8 {row['fp8_us']:.1f} us ({100 * row['fp8_share']:.0f}%)"
        )
    return rows


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    report = Report()
    check_paged(report)
    check_fused(report)
    report.say("checked")
    times = time_fused(report)
    print(f"{len(report.failures)} failures")
    for failure in report.failures:
        print("  ", failure)
    if args.out:
        args.out.write_text(
            json.dumps({"failures": report.failures, "results": report.results, "times": times}, indent=1)
        )
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
