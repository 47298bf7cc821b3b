"""Prefill, mixed steps and large decode steps on a GPU: numerics against the plain modules and fp32, and time.

    PYTHONPATH=python python tests/kernels/gpu_prefill.py --out prefill.json [--parts numerics,steps,configs,heads]

Prints every failure as it is found and a table last; the exit code is 1 if anything failed. `tests/run` does not run
it (no test_ prefix): it needs the GPU for itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fused_models import BLOCK_SIZE, LLAMA_8B, QWEN3_06B, Sizes
from fused_steps import relative_error
from gpu_fused import config_of
from gpu_report import Report, capture, time_ms
from torch import Tensor

from octavo.attention.base import ForwardContext, make_backend
from octavo.kernels.triton import paged_prefill
from octavo.kernels.triton.paged_prefill import PrefillConfig
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
Rows = list[tuple[int, int]]
"""(query length, kv length), rows of one token first."""
CHECKS: dict[str, Rows] = {
    "prefill 1 x 2048": [(2048, 2048)],
    "4 x 500 and 60 decodes": [(1, 1 + (i * 131) % 900) for i in range(60)] + [(500, 500), (500, 1100)] * 2,
    "decode 200": [(1, 1 + (i * 131) % 900) for i in range(200)],
}
PREFILLS: dict[str, Rows] = {
    "16 tokens": [(16, 16)],
    "1 x 2048": [(2048, 2048)],
    "8 x 1024": [(1024, 1024)] * 8,
    "1024 and 255 decodes": [(1, 1024)] * 255 + [(1024, 1024)],
}
DECODES: dict[str, Rows] = {
    f"decode {rows} x {length}": [(1, length)] * rows for rows, length in ((192, 190), (256, 190), (256, 1024))
}
KINDS = {
    "prefill_kernel": "attention",
    "attention_kernel": "attention",
    "decode_kernel": "attention",
    "reduce_kernel": "attention",
    "rms_norm_kernel": "norm",
    "gated_kernel": "activation",
    "rotate_write_kernel": "rotate + write",
    "write_kernel": "rotate + write",
    "nvjet": "product",
    "gemm": "product",
    "gemv": "product",
    "quantize": "quantization",
    "cutlass": "product",
}
"""Part of a kernel's name -> what it is for."""


def make_context(sizes: Sizes, rows: Rows, layers: int, max_kv_len: int | None = None) -> ForwardContext:
    """A step over shuffled blocks of random caches."""
    needed = [-(-length // BLOCK_SIZE) for _, length in rows]
    free = torch.randperm(sum(needed), device=DEVICE) + 1
    table_sb = torch.zeros(len(rows), max(needed) + 1, dtype=torch.int32, device=DEVICE)
    for row, (blocks, count) in enumerate(zip(free.split(needed), needed, strict=True)):
        table_sb[row, :count] = blocks
    counts = torch.tensor([count for count, _ in rows])
    length_r = torch.tensor([length for _, length in rows], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    position_t = torch.cat([torch.arange(length - count, length) for count, length in rows]).to(DEVICE)
    row_t = torch.arange(len(rows)).repeat_interleave(counts).to(DEVICE)
    shape = (sum(needed) + 1, 2, sizes.kv_heads, BLOCK_SIZE, sizes.head_dim)
    return ForwardContext(
        kv_cache=[torch.empty(shape, dtype=BF16, device=DEVICE).normal_() for _ in range(layers)],
        block_table_sb=table_sb,
        row_slot_r=torch.arange(len(rows), dtype=torch.int32, device=DEVICE),
        query_start_r=starts.to(DEVICE),
        kv_len_r=length_r.to(DEVICE),
        position_t=position_t,
        slot_mapping_t=table_sb[row_t, position_t // BLOCK_SIZE] * BLOCK_SIZE + position_t % BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_rows=len(rows),
        num_decode_rows=sum(count == 1 for count, _ in rows),
        num_tokens=int(starts[-1]),
        max_query_len=int(counts.max()),
        max_kv_len=max_kv_len or int(length_r.max()),
    )


@torch.inference_mode()
def make_models(sizes: Sizes, layers: int) -> tuple[Decoder, Decoder]:
    """(with fused kernels, plain) of the same random weights, which keep their input's size."""
    joined, plain = (
        build_model(config_of(sizes, layers), dtype=BF16, device=DEVICE, decode_kernels=kernels)
        for kernels in ("auto", "plain")
    )
    assert isinstance(joined, Decoder)
    assert isinstance(plain, Decoder)
    for (name, parameter), twin in zip(joined.named_parameters(), plain.parameters(), strict=True):
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0.0, 1.0 if name.startswith("embed") and not sizes.tied else parameter.shape[1] ** -0.5)
        twin.copy_(parameter)
    for model in (joined, plain):
        model.set_attention_backend(make_backend("triton"))
    return joined, plain


def run(model: Decoder, token_id_t: Tensor, ctx: ForwardContext) -> Tensor:
    """Hidden states of a step."""
    ctx.scratch.clear()
    return model.forward(token_id_t, ctx.position_t, ctx)


def tokens_of(sizes: Sizes, ctx: ForwardContext) -> Tensor:
    return torch.randint(0, sizes.vocab, (ctx.num_tokens,), device=DEVICE)


@torch.inference_mode()
def check_models(report: Report) -> None:
    """Both paths' distance to fp32, and the caches that they leave."""
    for name, sizes, layers in (("Llama-3.1-8B", LLAMA_8B, 2), ("Qwen3-0.6B", QWEN3_06B, 28)):
        joined, plain = make_models(sizes, layers)
        exact = build_model(config_of(sizes, layers), dtype=torch.float32, device=DEVICE, decode_kernels="plain")
        assert isinstance(exact, Decoder)
        exact.set_attention_backend(make_backend("reference"))
        for target, source in zip(exact.parameters(), joined.parameters(), strict=True):
            target.copy_(source)
        for case, rows in CHECKS.items():
            ctx = make_context(sizes, rows, layers)
            token_id_t = tokens_of(sizes, ctx)
            twin = replace(ctx, kv_cache=[cache.clone() for cache in ctx.kv_cache], scratch={})
            wide = replace(ctx, kv_cache=[cache.float() for cache in ctx.kv_cache], scratch={})
            expected = run(exact, token_id_t, wide)
            errors = [
                relative_error(run(*step), expected) for step in ((joined, token_id_t, ctx), (plain, token_id_t, twin))
            ]
            caches = max(relative_error(a, b) for a, b in zip(ctx.kv_cache, twin.kv_cache, strict=True))
            report.say(
                f"{name} {layers} layers, {case}: error to fp32 joined {errors[0]:.4f}, plain {errors[1]:.4f};"
                f" caches apart by {caches:.4f}"
            )
            report.check(f"{name} {case} hidden", errors[0], 1.25 * errors[1] + 2e-3)
            report.check(f"{name} {case} cache", caches, 2e-2)
        del joined, plain, exact
        torch.cuda.empty_cache()


def step_flop(sizes: Sizes, rows: Rows) -> float:
    """Of the layers: products and causal attention."""
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    layer = sizes.hidden * (2 * query + 2 * key + 3 * sizes.inner)
    seen = sum(count * (length - count) + count * (count + 1) / 2 for count, length in rows)
    return sizes.layers * (2 * sum(count for count, _ in rows) * layer + 4 * query * seen)


def eager_ms(step: Callable[[], Any], repeats: int = 5) -> tuple[float, float]:
    """(wall time of a step, time that the host takes to launch it), least of some."""
    step()
    torch.cuda.synchronize()
    walls, hosts = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - start)
    return 1e3 * min(walls), 1e3 * min(hosts)


def shares(step: Callable[[], Any]) -> dict[str, float]:
    """ms of each kind of kernel in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        kind = next((kind for part, kind in KINDS.items() if part in event.key), "other")
        found[kind] += event.self_device_time_total / 1e3
    return {kind: round(ms, 3) for kind, ms in sorted(found.items(), key=lambda item: -item[1]) if ms > 0}


def time_step(model: Decoder, sizes: Sizes, rows: Rows, ctx: ForwardContext) -> dict[str, Any]:
    """One path: eager wall and host time, GPU time as a graph (with logits of the last tokens)."""
    token_id_t = tokens_of(sizes, ctx)
    last_r = ctx.query_start_r[1:].long() - 1

    def step() -> Tensor:
        return model.logits(run(model, token_id_t, ctx)[last_r])

    eager, host = eager_ms(step)
    graph = time_ms(capture(step), repeats=5, inner=2)
    tflops = step_flop(sizes, rows) / graph / 1e9
    return {"graph_ms": graph, "eager_ms": eager, "host_ms": host, "tflops": tflops, "shares": shares(step)}


@torch.inference_mode()
def time_steps(report: Report) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, sizes in (("Llama-3.1-8B", LLAMA_8B), ("Qwen3-0.6B", QWEN3_06B)):
        joined, plain = make_models(sizes, sizes.layers)
        for case, rows in (PREFILLS | DECODES).items():
            bound = next(b for b in (256, 4096) if b >= max(length for _, length in rows))
            ctx = make_context(sizes, rows, sizes.layers, bound)
            for path, model in (("joined", joined), ("plain", plain)):
                found.append({"model": name, "step": case, "path": path} | time_step(model, sizes, rows, ctx))
            del ctx
            torch.cuda.empty_cache()
        report.say(f"{name} timed")
        del joined, plain, model
        torch.cuda.empty_cache()
    report.results += found
    return found


CONFIGS = [
    PrefillConfig(rows, tile, warps, stages)
    for rows, tile, warps, stages in (
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 64, 4, 3),
    )
]


@torch.inference_mode()
def time_configs(report: Report) -> None:
    """Prefill attention of a Llama layer under other configurations."""
    chosen = paged_prefill.choose_config
    for rows, length in ((1, 1024), (1, 2048), (8, 1024), (16, 2048), (1, 8192), (4, 8192)):
        steps: Rows = [(length, length)] * rows
        ctx = make_context(LLAMA_8B, steps, 1)
        q = torch.randn(ctx.num_tokens, 48, 128, device=DEVICE, dtype=BF16)[:, :32]
        flop = 4 * 32 * 128 * rows * length * (length + 1) / 2
        launch = partial(
            paged_prefill.paged_prefill,
            q, ctx.kv_cache[0], ctx.block_table_sb, ctx.row_slot_r, ctx.query_start_r, ctx.kv_len_r,
            torch.empty_like(q), first_row=0, num_rows=rows, max_query_len=length,
            scale=128**-0.5, window=0, soft_cap=0.0,
        )  # fmt: skip
        times: dict[str, float] = {}
        for config in [None, *CONFIGS]:
            paged_prefill.choose_config = chosen if config is None else lambda *_, config=config: config
            name = (
                "chosen" if config is None else f"{config.rows}x{config.tile} w{config.num_warps} s{config.num_stages}"
            )
            times[name] = flop / time_ms(capture(launch), repeats=3, inner=3) / 1e9
        paged_prefill.choose_config = chosen
        report.results.append({"attention": f"{rows} x {length}", "tflops": times})
        report.say(f"attention {rows} x {length}, TFLOP/s: " + ", ".join(f"{k} {v:.0f}" for k, v in times.items()))
        torch.cuda.empty_cache()


@torch.inference_mode()
def time_heads(report: Report) -> None:
    """fp32 logits: the product in bf16 and a cast, or the product's own fp32 result."""
    for sizes in (LLAMA_8B, QWEN3_06B):
        weight = torch.randn(sizes.vocab, sizes.hidden, device=DEVICE, dtype=BF16)
        for rows in (160, 256):
            hidden = torch.randn(rows, sizes.hidden, device=DEVICE, dtype=BF16)
            cast = partial(lambda x, w: torch.nn.functional.linear(x, w).float(), hidden, weight)
            wide = partial(lambda x, w: torch.mm(x, w.t(), out_dtype=torch.float32), hidden, weight)
            report.check(f"head {rows}", relative_error(wide(), cast()), 4e-3)
            times = [1e3 * time_ms(capture(run_head), 5, 3) for run_head in (cast, wide)]
            report.results.append({"head": [rows, sizes.vocab], "cast_us": times[0], "wide_us": times[1]})
            report.say(f"head {rows} x {sizes.vocab}: cast {times[0]:.0f} us, fp32 product {times[1]:.0f} us")


PARTS: dict[str, Callable[[Report], Any]] = {
    "numerics": check_models,
    "configs": time_configs,
    "heads": time_heads,
    "steps": time_steps,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    torch.manual_seed(0)
    report = Report()
    timed: list[dict[str, Any]] = []
    for part in options.parts.split(","):
        timed += PARTS[part](report) or []
    if options.out:
        options.out.write_text(json.dumps({"failures": report.failures, "results": report.results}, indent=1))
    for row in timed:
        parts = ", ".join(f"{kind} {ms:.2f}" for kind, ms in row["shares"].items())
        rate = f"{row['graph_ms']:8.3f} ms {row['tflops']:3.0f} TF"
        print(
            f"{row['model']:12} {row['step']:20} {row['path']:6} graph {rate}"
            f"  eager {row['eager_ms']:8.3f} host {row['host_ms']:7.3f}  [{parts}]"
        )
    print("FAILED:" if report.failures else "all checks passed", *report.failures, sep="\n  ")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
