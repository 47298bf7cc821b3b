"""Checks the paged kernels on a GPU and times them: `python tests/kernels/gpu_check.py [out.json]`.

Numerics in bf16 against the fp32 reference on fresh random steps, CUDA graph replays with other lengths than were
captured, then decode and prefill attention at Llama-3.1-8B's shape (32 query heads, 8 KV heads, head dim 128). Times
are medians of CUDA graph replays over caches that together exceed the L2 cache. Exits 1 when a number is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu_report import capture, time_ms
from paged_steps import Step, make_step
from torch import Tensor

from octavo.attention.base import ForwardContext
from octavo.attention.reference import ReferenceAttention
from octavo.attention.triton import TritonAttention
from octavo.kernels.reference import apply_updates as reference_updates
from octavo.kernels.reference import prepare as reference_prepare
from octavo.kernels.triton import apply_updates, prepare
from octavo.kernels.triton.paged_decode import paged_decode, plan_decode
from octavo.kernels.triton.paged_prefill import paged_prefill

READ_BYTES_PER_S = 4.57e12
"""What a read-only kernel reached on an H200."""
PEAK_FLOPS = 989e12
"""Dense bf16 of an H200."""
ROTATED_BYTES = 256 * 2**20
"""Caches of one measurement together, at least: four times the L2 cache."""
RELATIVE_ERROR = 8e-3
"""Norm of the difference over norm of the reference; bf16 outputs alone give 2e-3."""

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
DECODE = [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (64, 4096)]
PREFILL = [(1, 2048), (16, 2048)]
"""(rows, kv length)"""

ROW_TENSORS = ("row_slot_r", "query_start_r", "kv_len_r", "position_t", "slot_mapping_t")

CASES: dict[str, dict[str, object]] = {
    "decode": {"rows": [(1, 1), (1, 64), (1, 65), (1, 1000), (1, 4097)]},
    "many decode rows": {"rows": [(1, 50 + 7 * i) for i in range(90)]},
    "prefill": {"rows": [(700, 700), (33, 900), (1, 5), (128, 128)]},
    "mixed": {"rows": [(1, 300), (1, 20), (200, 333), (5, 64)]},
    "smollm2": {"rows": [(1, 300), (200, 333)], "heads": 9, "kv_heads": 3, "dim": 64},
    "multi-head": {"rows": [(1, 300), (200, 333)], "heads": 12, "kv_heads": 12, "dim": 64},
    "head dim 80": {"rows": [(1, 300), (200, 333)], "heads": 16, "kv_heads": 16, "dim": 80},
    "gemma-2": {
        "rows": [(1, 900), (300, 700)],
        "heads": 16,
        "kv_heads": 8,
        "dim": 256,
        "window": 256,
        "soft_cap": 50.0,
    },
    "window": {"rows": [(1, 900), (300, 700), (40, 40)], "window": 100},
    "block 16": {"rows": [(1, 900), (300, 700)], "block_size": 16},
    "fp16": {"rows": [(1, 900), (300, 700)], "dtype": torch.float16},
    "fp32": {"rows": [(1, 900), (300, 700)], "dtype": torch.float32},
    "fp32, head dim 256": {"rows": [(1, 200), (50, 100)], "dtype": torch.float32, "dim": 256},
}


@dataclass
class Timing:
    """One measured launch."""

    kind: str
    rows: int
    kv_len: int
    us: float
    percent_of_ceiling: float
    """Of the memory's for decode, of the tensor cores' for prefill."""
    tflops: float
    gb_per_s: float
    config: str


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over norm of what is wanted; infinite when something is not finite."""
    if not got.isfinite().all():
        return float("inf")
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def attend(backend: TritonAttention | ReferenceAttention, step: Step, ctx: ForwardContext) -> Tensor:
    backend.prepare(ctx)
    return backend.attend(step.spec, step.q_thd, step.k_tgd, step.v_tgd, ctx)


def check_attention(device: str) -> dict[str, float]:
    """Relative error of each case."""
    errors = {}
    for name, options in CASES.items():
        defaults: dict[str, object] = {
            "heads": 32,
            "kv_heads": 8,
            "dim": 128,
            "block_size": 64,
            "dtype": torch.bfloat16,
        }
        step = make_step(**(defaults | options), device=device)  # type: ignore[arg-type]
        ctx = step.clone_ctx()
        got = attend(TritonAttention(), step, ctx)
        errors[name] = relative_error(got, attend(ReferenceAttention(), step, step.ctx))
        if not torch.equal(ctx.kv_cache[0].nan_to_num(7), step.ctx.kv_cache[0].nan_to_num(7)):
            errors[f"{name}: cache"] = float("inf")
    return errors


def check_graph(device: str) -> dict[str, float]:
    """Capture a decode step once, then replay it for rows of other lengths, slots and blocks."""
    errors = {}
    steps = [
        make_step([(1, length) for length in lengths], heads=32, kv_heads=8, dim=128, block_size=64, seed=seed,
                  dtype=torch.bfloat16, device=device)
        for seed, lengths in enumerate([[5] * 8, [1, 64, 65, 700, 1500, 30, 129, 2000], [2000] * 8])
    ]  # fmt: skip
    biggest = steps[2]
    static = biggest.clone_ctx()
    for name in ROW_TENSORS:
        setattr(static, name, getattr(static, name).clone())
    static.block_table_sb = torch.zeros(16, 64, dtype=torch.int32, device=device)
    static.max_kv_len = 4096
    q, k, v = (x.clone() for x in (biggest.q_thd, biggest.k_tgd, biggest.v_tgd))
    fixed = Step(static, biggest.spec, q, k, v)
    load(fixed, steps[0])
    attend(TritonAttention(), fixed, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(TritonAttention(), fixed, static)
    for index, step in enumerate(steps):
        load(fixed, step)
        graph.replay()
        errors[f"graph replay {index}"] = relative_error(out, attend(ReferenceAttention(), step, step.ctx))
    return errors


def load(fixed: Step, step: Step) -> None:
    """Put a step's numbers where a captured graph reads them."""
    for name in ROW_TENSORS:
        getattr(fixed.ctx, name).copy_(getattr(step.ctx, name))
    slots, width = step.ctx.block_table_sb.shape
    fixed.ctx.block_table_sb[:slots, :width].copy_(step.ctx.block_table_sb)
    fixed.ctx.kv_cache[0][: step.ctx.kv_cache[0].shape[0]].copy_(step.ctx.kv_cache[0])
    for mine, theirs in zip((fixed.q_thd, fixed.k_tgd, fixed.v_tgd), (step.q_thd, step.k_tgd, step.v_tgd), strict=True):
        mine.copy_(theirs)


def check_step_kernels(device: str) -> dict[str, float]:
    """`prepare_step` and `apply_updates`: exact, so errors are 0 or infinite."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.arange(0, 300 * 9, 9, dtype=torch.int32)
    ids = torch.randint(-1, 3, (int(starts[-1]) + 7,), generator=generator, dtype=torch.int32)
    position = torch.randint(0, 640, ids.shape, generator=generator, dtype=torch.int32)
    slots = torch.randperm(400, generator=generator)[: starts.shape[0] - 1].int()
    table = torch.randint(0, 1000, (1, 400, 10), generator=generator, dtype=torch.int32)
    arena = [x.to(device) for x in (ids, position, slots, starts, table, torch.randint(0, 9, (400,)))]
    got = prepare.prepare_step(*arena, block_size=64)
    want = reference_prepare.prepare_step(*arena, block_size=64)
    same = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    caches = [torch.randn(50, 2, 8, 64, 128, device=device).bfloat16() for _ in range(3)]
    place = torch.randperm(4000, generator=generator)[:600].int()
    update = torch.stack([place // 10, place % 10, place % 50], 1).to(device)
    copies = torch.randperm(50, generator=generator)[:20].reshape(-1, 2).int().to(device)
    copied, want_table = [cache.clone() for cache in caches], arena[4].clone()
    reference_updates.apply_updates(want_table[0], update, copied, copies)
    apply_updates.apply_updates(arena[4][0], update, caches, copies)
    updated = torch.equal(arena[4], want_table) and all(map(torch.equal, caches, copied))
    return {"prepare_step": 0.0 if same else float("inf"), "apply_updates": 0.0 if updated else float("inf")}


def replay_us(launches: list[Callable[[], None]], repeats: int = 15) -> float:
    """Median microseconds of one launch, all captured back to back in one graph."""
    graph = capture(lambda: [launch() for launch in launches])
    return 1e3 * time_ms(graph, repeats, inner=1) / len(launches)


def paged_inputs(rows: int, kv_len: int, queries: int) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    """(q, caches, table, slots, starts, lengths) of rows of one length, blocks shuffled."""
    width = -(-kv_len // BLOCK)
    count = 1 + rows * width
    bytes_each = count * 2 * KV_HEADS * BLOCK * DIM * 2
    copies = max(2, -(-ROTATED_BYTES // bytes_each))
    caches = [torch.randn(count, 2, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    table = (torch.randperm(rows * width, device="cuda") + 1).int().reshape(rows, width)
    slots = torch.arange(rows, device="cuda", dtype=torch.int32)
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * queries
    lengths = torch.full((rows,), kv_len, device="cuda", dtype=torch.int32)
    q = torch.randn(rows * queries, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    return q, caches, table, slots, starts, lengths


def time_decode(rows: int, kv_len: int) -> Timing:
    """Attention of one layer without the KV write."""
    q, caches, table, slots, _, lengths = paged_inputs(rows, kv_len, 1)
    plan = plan_decode(rows, HEADS, KV_HEADS, DIM, 2, kv_len)
    part, stat = (torch.empty(max(size, 1), device="cuda") for size in plan.scratch_sizes(rows, KV_HEADS))
    out = torch.empty_like(q)

    def launch(cache: Tensor) -> Callable[[], None]:
        return lambda: paged_decode(
            q, cache, table, slots, lengths, out, plan, part, stat,
            num_rows=rows, scale=DIM**-0.5, window=0, soft_cap=0.0,
        )  # fmt: skip

    us = replay_us([launch(cache) for cache in caches] * (1 if len(caches) > 8 else 4))
    rate = rows * kv_len * 2 * KV_HEADS * DIM * 2 / us * 1e6
    flops = 4 * rows * kv_len * HEADS * DIM / us * 1e6
    config = f"{plan.splits} splits, {plan.config.tile} x {plan.config.num_stages} stages"
    return Timing("decode", rows, kv_len, us, 100 * rate / READ_BYTES_PER_S, flops / 1e12, rate / 1e9, config)


def time_prefill(rows: int, kv_len: int) -> Timing:
    """Attention of one layer over whole prompts, without the KV write."""
    q, caches, table, slots, starts, lengths = paged_inputs(rows, kv_len, kv_len)
    out = torch.empty_like(q)

    def launch(cache: Tensor) -> Callable[[], None]:
        return lambda: paged_prefill(
            q, cache, table, slots, starts, lengths, out,
            first_row=0, num_rows=rows, max_query_len=kv_len, scale=DIM**-0.5, window=0, soft_cap=0.0,
        )  # fmt: skip

    us = replay_us([launch(cache) for cache in caches[:8]])
    flops = 2 * rows * kv_len * (kv_len + 1) * HEADS * DIM / us * 1e6
    rate = rows * kv_len * 2 * KV_HEADS * DIM * 2 / us * 1e6
    return Timing("prefill", rows, kv_len, us, 100 * flops / PEAK_FLOPS, flops / 1e12, rate / 1e9, "")


def check_all(device: str = "cuda") -> dict[str, float]:
    """Error of every check; each must be at most `RELATIVE_ERROR`."""
    errors = check_attention(device) | check_step_kernels(device)
    return errors | check_graph(device) if device == "cuda" else errors


def main(path: str | None) -> int:
    errors = check_all()
    for name, error in errors.items():
        print(f"{'ok  ' if error <= RELATIVE_ERROR else 'BAD '} {name:24s} {error:.2e}", flush=True)
    timings = [time_decode(*shape) for shape in DECODE] + [time_prefill(*shape) for shape in PREFILL]
    print(f"{'':8s} {'rows':>5s} {'kv':>6s} {'us':>9s} {'% ceiling':>9s} {'TFLOP/s':>8s} {'GB/s':>6s}  config")
    for t in timings:
        print(
            f"{t.kind:8s} {t.rows:5d} {t.kv_len:6d} {t.us:9.1f} {t.percent_of_ceiling:9.1f}"
            f" {t.tflops:8.1f} {t.gb_per_s:6.0f}  {t.config}"
        )
    if path:
        device = torch.cuda.get_device_name()
        result = {"device": device, "errors": errors, "timings": [asdict(t) for t in timings]}
        Path(path).write_text(json.dumps(result, indent=1))
    return int(any(not error <= RELATIVE_ERROR for error in errors.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
