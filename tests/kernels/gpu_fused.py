"""The fused decode kernels on a Hopper GPU: numerics, whole models against the plain path, and time.

    PYTHONPATH=python python tests/kernels/gpu_fused.py --out fused.json [--parts numerics,models,timing,variants]

Compiles in parallel first. Prints every failure as it is found and a table last; the exit code is 1 if anything failed.
`tests/run` does not run it (no test_ prefix): it needs the GPU for itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fused_models import BLOCK_SIZE, LLAMA_8B, QWEN3_06B, Sizes, make_context, raw_config
from fused_steps import make_attention, relative_error
from gpu_report import Part, Report, capture, run_parts, time_ms
from torch import Tensor

from octavo.attention.base import ForwardContext, make_backend
from octavo.kernels.reference.skinny_linear import add_linear, gated_linear, linear, rms_norm
from octavo.kernels.triton import decode_attention_launches as attention
from octavo.kernels.triton.decode_attention_fused import attention_kernel
from octavo.kernels.triton.decode_attention_launches import AttentionScratch, HeadShape, attend
from octavo.kernels.triton.launch import Launch, compile_together
from octavo.kernels.triton.skinny_linear import (
    ResidualStream,
    SkinnyLinear,
    SplitScratch,
    add_residual,
    scaled_store,
    store,
)
from octavo.kernels.triton.skinny_table import Ring, bucket_for
from octavo.layers.fused.decode import FusedDecode
from octavo.models.config import NormalConfig, normalize_config
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
MODELS = {"Llama-3.1-8B": LLAMA_8B, "Qwen3-0.6B": QWEN3_06B}
BATCHES = (1, 8, 32, 64, 128)
MODEL_ROWS = (1, 8, 33, 64, 128)
CONTEXTS = {190: 256, 1024: 4096}
"""Tokens a row -> the bound that a graph would be captured with."""
READ_BYTES_PER_S = 4.57e12


# --- single kernels


def product_shapes(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """op -> (n, k)."""
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return {
        "qkv": (query + 2 * key, sizes.hidden),
        "o": (sizes.hidden, query),
        "gate_up": (sizes.inner, sizes.hidden),
        "down": (sizes.hidden, sizes.inner),
        "head": (sizes.vocab, sizes.hidden),
    }


@dataclass
class ProductCase:
    """A product with random inputs, its launch, and what it must give."""

    name: str
    launch: Launch
    outputs: Callable[[], list[tuple[Tensor, Tensor]]]
    """(actual, expected) after the launch has run."""


def product_case(name: str, op: str, n: int, k: int, rows: int, has_bias: bool) -> ProductCase:
    """Inputs as a layer would get them, its normed input in five partial sums of squares."""
    matrix_rows = 2 * n if op == "gate_up" else n
    weight = torch.randn(matrix_rows, k, device=DEVICE, dtype=BF16) * k**-0.5
    bias = torch.randn(matrix_rows, device=DEVICE, dtype=BF16) if has_bias else None
    product = SkinnyLinear.make(op, weight, bias)
    if op in ("o", "down"):
        return residual_case(name, product, rows)
    x_mk = torch.randn(rows, k, device=DEVICE, dtype=BF16) * 3
    y_mn = torch.full((rows, n), torch.nan, device=DEVICE, dtype=torch.float32 if op == "head" else BF16)
    stream = ResidualStream.allocate(k, BF16, DEVICE)
    if op == "head":
        return ProductCase(name, store(product, x_mk, y_mn, stream), lambda: [(y_mn, linear(x_mk, weight, None))])
    gain = 0.5 + torch.rand(k, device=DEVICE)
    stream.gained_mn[:rows] = x_mk.float() * gain
    partials, bucket = 5, bucket_for(rows)
    parts = x_mk.float().square().tensor_split(partials, dim=1)
    stream.squares_f.view(-1, bucket)[:partials, :rows] = torch.stack([part.sum(1) for part in parts])
    epilogue = "silu" if op == "gate_up" else "store"
    launch = scaled_store(product, stream, y_mn, partials=partials, epilogue=epilogue, eps=1e-5)
    reference = gated_linear if op == "gate_up" else linear
    return ProductCase(name, launch, lambda: [(y_mn, reference(rms_norm(x_mk, gain, 1e-5), weight, bias))])


def residual_case(name: str, product: SkinnyLinear, rows: int) -> ProductCase:
    """The residual and what the next norm gets."""
    n, k = product.n, product.k
    x_mk = torch.randn(rows, k, device=DEVICE, dtype=BF16)
    gain = (0.5 + torch.rand(n, device=DEVICE)).to(BF16)
    stream = ResidualStream.allocate(n, BF16, DEVICE)
    stream.residual_mn.normal_()
    before = stream.residual_mn[:rows].clone()
    split = SplitScratch.allocate([product], DEVICE)
    launch = add_residual(product, x_mk, stream, gain, split)

    def outputs() -> list[tuple[Tensor, Tensor]]:
        residual = stream.residual_mn[:rows]
        squares = stream.squares_f.view(-1, bucket_for(rows))[: product.num_tiles(rows), :rows].sum(0)
        return [
            (residual, add_linear(before, x_mk, product.weight, product.bias)),
            (stream.gained_mn[:rows], residual.float() * gain.float()),
            (squares, residual.float().square().sum(1)),
            (split.count_f.float() + 1, torch.ones_like(split.count_f)),
        ]

    return ProductCase(name, launch, outputs)


def check_products(report: Report) -> None:
    cases = []
    for model, sizes in MODELS.items():
        for op, (n, k) in product_shapes(sizes).items():
            for rows in (1, 2, 16, 17, 64, 100, 128):
                has_bias = op != "head" and sizes is QWEN3_06B
                cases.append((f"{model} {op} {rows} rows", op, n, k, rows, has_bias))
    made = [product_case(*case) for case in cases if case[4] in (1, 16, 17, 64, 100)]
    report.say(f"{compile_together(case.launch for case in made)} products compiled")
    del made
    for case_args in cases:
        case = product_case(*case_args)
        case.launch.run()
        for i, (actual, expected) in enumerate(case.outputs()):
            report.check(f"{case.name} output {i}", relative_error(actual, expected), 8e-3)
    report.say(f"{len(cases)} products checked")


def check_repeats(report: Report) -> None:
    """Split products give the same bits whoever arrives last."""
    for model, sizes in MODELS.items():
        n, k = product_shapes(sizes)["o"]
        product = SkinnyLinear.make("o", torch.randn(n, k, device=DEVICE, dtype=BF16), None)
        x_mk, gain = torch.randn(16, k, device=DEVICE, dtype=BF16), torch.ones(n, device=DEVICE, dtype=BF16)
        stream, split = ResidualStream.allocate(n, BF16, DEVICE), SplitScratch.allocate([product], DEVICE)
        launch = add_residual(product, x_mk, stream, gain, split)
        seen, different = None, torch.zeros((), device=DEVICE)
        for _ in range(500):
            stream.residual_mn.fill_(0.5)
            launch.run()
            seen = stream.residual_mn.clone() if seen is None else seen
            different += (seen != stream.residual_mn).any()
        report.check(f"{model} o 500 repeats that differ", different.item(), 0.5)


ATTENTION = {
    "llama": (HeadShape(32, 8, 128), {}),
    "qwen3": (HeadShape(16, 8, 128), {"qk_norm": True}),
    "qwen2": (HeadShape(28, 4, 128), {}),
    "group-16-dim-64": (HeadShape(32, 2, 64), {}),
    "mha-dim-64": (HeadShape(8, 8, 64), {"window": 100}),
    "window": (HeadShape(32, 8, 128), {"window": 700}),
    "sinks": (HeadShape(64, 8, 64), {"has_sinks": True}),
    "sinks-window": (HeadShape(64, 8, 64), {"has_sinks": True, "window": 128}),
}


def mixed(rows: int, longest: int) -> list[int]:
    """Lengths between 1 and `longest`, with borders of blocks among them."""
    edges = [1, 64, 65, 63, 2, 128, 129, longest]
    return [edges[i] if i < len(edges) else 1 + (i * 7919) % longest for i in range(rows)][-rows:]


def attention_cases() -> list[tuple[str, HeadShape, list[int], dict[str, Any]]]:
    rows = {"1 x 1": [1], "1 x 190": [190], "1 x 9000": [9000], "8 mixed": mixed(8, 5000), "33 mixed": mixed(33, 700)}
    rows |= {"64 short": mixed(64, 250), "128 mixed": mixed(128, 1500)}
    return [(f"{h} {r}", heads, lengths, o) for h, (heads, o) in ATTENTION.items() for r, lengths in rows.items()]


def check_attention(report: Report) -> None:
    made = []
    for name, heads, lengths, options in attention_cases():
        case = make_attention(lengths, heads, dtype=BF16, device="cuda", seed=len(made), **options)
        scratch = AttentionScratch.allocate(heads, 128, DEVICE)
        out = torch.full((len(lengths), heads.num_heads * heads.head_dim), torch.nan, device=DEVICE, dtype=BF16)
        made.append((name, case, out, attend(case.layer, case.qkv_ro, case.kv_cache, case.rows, scratch, out)))
    report.say(f"{compile_together(launch for *_, launches in made for launch in launches)} attention kernels compiled")
    for name, case, out, launches in made:
        expected_cache = case.kv_cache.clone()
        for launch in launches:
            launch.run()
        expected = case.expected(expected_cache)
        report.check(f"attention {name}", relative_error(out, expected), 8e-3)
        report.check(f"attention {name} cache", relative_error(case.kv_cache, expected_cache), 1e-4)
    report.say(f"{len(made)} attention cases checked")


# --- whole models


def config_of(sizes: Sizes, layers: int) -> NormalConfig:
    """The config of a model of these sizes."""
    architecture, model_type = ("Qwen3ForCausalLM", "qwen3") if sizes.qk_norm else ("LlamaForCausalLM", "llama")
    own = {"architectures": [architecture], "model_type": model_type, "num_hidden_layers": layers}
    served = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 500000.0}
    return normalize_config(raw_config(sizes) | own | served)


@torch.inference_mode()
def make_model(sizes: Sizes, layers: int) -> Decoder:
    """Random weights that keep their input's size; fused decode kernels."""
    model = build_model(config_of(sizes, layers), dtype=BF16, device=DEVICE, decode_kernels="fused")
    assert isinstance(model, Decoder)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0.0, 1.0 if name.startswith("embed") and not sizes.tied else parameter.shape[1] ** -0.5)
    model.set_attention_backend(make_backend("triton"))
    return model


@dataclass
class Step:
    """A model and a decode step's inputs."""

    model: Decoder
    ctx: ForwardContext
    token_id_t: Tensor

    def plain(self, run: Callable[[], Tensor]) -> Tensor:
        """Run something with the modules instead of the fused kernels."""
        kernels, self.model.decode_kernels = self.model.decode_kernels, None
        try:
            return run()
        finally:
            self.model.decode_kernels = kernels

    def logits(self) -> Tensor:
        """The step, embedding to logits."""
        self.ctx.scratch.clear()
        return self.model.logits(self.model.forward(self.token_id_t, self.ctx.position_t, self.ctx))

    def launches(self) -> list[Launch]:
        """The fused path's kernels."""
        kernels = self.model.decode_kernels
        assert isinstance(kernels, FusedDecode)
        assert kernels._head is not None
        hidden = kernels._buffers.hidden_tm[: self.ctx.num_rows]
        logits = torch.empty(self.ctx.num_rows, self.model.vocab_size, device=DEVICE)
        head = store(kernels._head, hidden, logits, kernels._buffers.stream)
        return [*kernels.launches(self.token_id_t, self.ctx), head]


def make_step(model: Decoder, sizes: Sizes, lengths: list[int], max_kv_len: int | None = None) -> Step:
    layers = len(model.attention_specs)
    ctx = make_context(sizes, lengths, layers=layers, device="cuda", max_kv_len=max_kv_len)
    return Step(model, ctx, torch.randint(0, sizes.vocab, (len(lengths),), device=DEVICE))


@torch.inference_mode()
def exact_logits(model: Decoder, exact: Decoder, step: Step) -> Tensor:
    """The step in fp32 from the same weights and cache."""
    for target, source in zip(exact.parameters(), model.parameters(), strict=True):
        target.copy_(source)
    ctx = replace(step.ctx, kv_cache=[cache.float() for cache in step.ctx.kv_cache], scratch={})
    return exact.logits(exact.forward(step.token_id_t, ctx.position_t, ctx))


@torch.inference_mode()
def check_models(report: Report) -> None:
    for name, sizes, layers in (("Llama-3.1-8B", LLAMA_8B, 2), ("Qwen3-0.6B", QWEN3_06B, 28)):
        model = make_model(sizes, layers)
        exact = build_model(config_of(sizes, layers), dtype=torch.float32, device=DEVICE, decode_kernels="plain")
        assert isinstance(exact, Decoder)
        exact.set_attention_backend(make_backend("reference"))
        steps = {rows: make_step(model, sizes, mixed(rows, 700)) for rows in MODEL_ROWS}
        report.say(
            f"{name}: {compile_together(k for step in steps.values() for k in step.launches())} kernels compiled"
        )
        for rows, step in steps.items():
            expected = exact_logits(model, exact, step)
            original = [cache.clone() for cache in step.ctx.kv_cache]
            fused = step.logits()
            written = step.ctx.kv_cache
            step.ctx.kv_cache = original
            plain = step.plain(step.logits)
            errors = {"fused": relative_error(fused, expected), "plain": relative_error(plain, expected)}
            errors["fused-plain"] = relative_error(fused, plain)
            agree = (fused.argmax(-1) == plain.argmax(-1)).float().mean().item()
            best = expected.max(-1).values
            gap = (best - expected.gather(1, fused.argmax(-1, keepdim=True))[:, 0]).max().item()
            report.say(
                f"{name} {layers} layers, {rows} rows: error to fp32 fused {errors['fused']:.4f}, plain"
                f" {errors['plain']:.4f}; fused to plain {errors['fused-plain']:.4f}; argmax agrees {agree:.3f};"
                f" fp32 gap of fused argmax {gap:.3f}"
            )
            report.results.append(
                {"model": name, "layers": layers, "rows": rows, **errors, "argmax": agree, "gap": gap}
            )
            report.check(f"{name} {rows} rows fused", errors["fused"], 1.25 * errors["plain"] + 2e-3)
            cache_error = max(relative_error(a, b) for a, b in zip(written, original, strict=True))
            report.check(f"{name} {rows} rows cache", cache_error, 2e-2)
        del model, exact, steps
        torch.cuda.empty_cache()


# --- time


def floor_ms(sizes: Sizes, lengths: list[int]) -> float:
    """Time to read weights and KV once."""
    layer = sum(n * k * (2 if op == "gate_up" else 1) for op, (n, k) in product_shapes(sizes).items() if op != "head")
    weights = sizes.layers * layer + sizes.vocab * sizes.hidden
    kv = sum(lengths) * 2 * sizes.layers * sizes.kv_heads * sizes.head_dim
    return 2 * (weights + kv) / READ_BYTES_PER_S * 1e3


def time_point(model: Decoder, sizes: Sizes, batch: int, context: int, bound: int) -> dict[str, Any]:
    """Both paths at one batch and context (the fused path alone where the bound is not the context's class)."""
    lengths = [context] * batch
    step = make_step(model, sizes, lengths, bound)
    fused = time_ms(capture(step.logits))
    plain = None if bound > max(CONTEXTS.values()) else step.plain(lambda: time_ms(capture(step.logits)))
    times = {"fused_ms": fused, "plain_ms": plain, "floor_ms": floor_ms(sizes, lengths)}
    return {"rows": batch, "context": context, "bound": bound, **times}


@torch.inference_mode()
def time_models(report: Report) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, sizes in MODELS.items():
        model = make_model(sizes, sizes.layers)
        points = [(batch, context, bound) for batch in BATCHES for context, bound in CONTEXTS.items()]
        points += [(batch, 190, 1 << 17) for batch in BATCHES]
        kernels: list[Launch] = []
        for batch, _, bound in points:
            kernels += make_step(model, sizes, [64] * batch, bound).launches()
        report.say(f"{name}: {compile_together(kernels)} kernels compiled")
        del kernels
        for batch, context, bound in points:
            rows.append({"model": name} | time_point(model, sizes, batch, context, bound))
            torch.cuda.empty_cache()
        report.say(f"{name} timed")
        del model
        torch.cuda.empty_cache()
    report.results += rows
    return rows


HEAD_CANDIDATES = [
    Ring(0, 64, 128, 1, 4, True, 4),
    Ring(0, 64, 128, 1, 5, True, 4),
    Ring(0, 64, 128, 1, 3, True, 4),
    Ring(0, 64, 64, 1, 6, True, 4),
    Ring(0, 128, 64, 1, 4, True, 4),
    Ring(0, 128, 64, 1, 4, True, 8),
    Ring(0, 64, 64, 1, 6, False, 4),
    Ring(0, 128, 64, 1, 4, False, 4),
    Ring(0, 128, 64, 1, 3, False, 4),
    Ring(0, 32, 128, 1, 5, False, 4),
    Ring(0, 64, 64, 1, 4, False, 8),
    Ring(0, 128, 64, 1, 4, False, 8),
]


@torch.inference_mode()
def time_heads(report: Report) -> None:
    """Candidates for the head, which no chain was tuned for."""
    for name, sizes in MODELS.items():
        n, k = sizes.vocab, sizes.hidden
        weight = torch.randn(n, k, device=DEVICE, dtype=BF16)
        stream = ResidualStream.allocate(k, BF16, DEVICE)
        for rows in (16, 32, 64, 128):
            x_mk, y_mn = torch.randn(rows, k, device=DEVICE, dtype=BF16), torch.empty(rows, n, device=DEVICE)
            found: list[tuple[Ring, Launch]] = []
            for candidate in HEAD_CANDIDATES:
                config = replace(candidate, block_m=rows)
                lower = rows if not config.swap else config.block_n
                if config.fits("head", n, k) and lower >= 16 * config.warps:
                    found.append(
                        (config, store(SkinnyLinear("head", weight, None, {rows: config}), x_mk, y_mn, stream))
                    )
            compile_together(launch for _, launch in found)
            times = sorted((1e3 * time_ms(capture(launch.run), 5, 3), str(config)) for config, launch in found)
            blas = 1e3 * time_ms(capture(lambda: torch.nn.functional.linear(x_mk, weight).float()), 5, 3)  # noqa: B023
            report.results.append({"head": name, "rows": rows, "us": times, "blas_us": blas})
            report.say(
                f"{name} head {rows} rows: blas + float {blas:.0f} us; "
                + "; ".join(f"{t:.0f} {c}" for t, c in times[:3])
            )


@torch.inference_mode()
def time_attention_choices(report: Report) -> None:
    """Stages and splits of attention inside an 8-layer chain."""
    choose_stages, choose_splits = attention.choose_stages, attention.choose_splits
    for name, sizes in MODELS.items():
        model = make_model(sizes, 8)
        for rows, context, stages, splits in (
            (1, 190, (4,), (1, 2, 4)),
            (1, 1024, (3, 4), (4, 8, 16)),
            (8, 190, (2, 4), (1, 2)),
            (8, 1024, (3, 4), (1, 2, 4)),
            (32, 190, (2, 3, 4), (1, 2)),
            (32, 1024, (2, 3, 4), (1, 2)),
            (64, 190, (2, 3, 4), (1,)),
            (64, 1024, (2, 3, 4), (1, 2)),
        ):
            step = make_step(model, sizes, [context] * rows)
            times = {}
            for count in splits:
                for depth in stages:
                    attention.choose_stages = lambda *_, depth=depth: depth
                    attention.choose_splits = lambda *_, count=count: count
                    compile_together(step.launches())
                    kernels = model.decode_kernels
                    assert kernels is not None
                    graph = capture(lambda: kernels.forward(step.token_id_t, step.ctx))  # noqa: B023
                    times[f"splits {count} stages {depth}"] = 1e3 * time_ms(graph, 5, 3) / 8
            attention.choose_stages, attention.choose_splits = choose_stages, choose_splits
            chosen = f"splits {choose_splits(rows, sizes.kv_heads, context)} stages {choose_stages(rows, context)}"
            report.results.append({"attention": name, "rows": rows, "context": context, "us_per_layer": times})
            shown = ", ".join(f"{k} {v:.1f}" for k, v in sorted(times.items(), key=lambda item: item[1]))
            report.say(f"{name} {rows} x {context} us/layer: {shown} (chosen: {chosen})")


def time_attention_alone(report: Report) -> None:
    """Stages and warps of one layer's attention where many programs share a multiprocessor; 8 caches in turn."""
    heads = HeadShape(LLAMA_8B.heads, LLAMA_8B.kv_heads, LLAMA_8B.head_dim)
    chains: dict[tuple[int, int], dict[str, list[Launch]]] = {}
    for rows, context in ((64, 190), (128, 190), (256, 160), (256, 190), (64, 1024), (256, 1024)):
        case = make_attention([context] * rows, heads, dtype=BF16, device="cuda")
        caches = [case.kv_cache.clone() for _ in range(8)]
        scratch = AttentionScratch.allocate(heads, rows, DEVICE)
        out = torch.zeros(rows, heads.num_heads * heads.head_dim, device=DEVICE, dtype=BF16)
        usual = [k for c in caches for k in attention.attend(case.layer, case.qkv_ro, c, case.rows, scratch, out)]
        chains[rows, context] = {
            f"stages {stages} warps {warps}": [replace(k, num_stages=stages, num_warps=warps) for k in usual]
            for stages in (1, 2, 3, 4)
            for warps in (2, 4, 8)
        } | {"usual": usual}
    compile_together(launch for chain in chains.values() for launches in chain.values() for launch in launches)
    report.say("alone: compiled")
    for (rows, context), chain in chains.items():
        times = {}
        for name, launches in chain.items():
            graph = capture(lambda: [launch.run() for launch in launches])  # noqa: B023
            times[name] = 1e3 * time_ms(graph, 5, 3) / 8
        report.results.append({"attention alone": rows, "context": context, "us": times})
        shown = ", ".join(f"{k} {v:.1f}" for k, v in sorted(times.items(), key=lambda item: item[1])[:4])
        floor_us = rows * context * 2 * heads.num_kv_heads * heads.head_dim * 2 / READ_BYTES_PER_S * 1e6
        report.say(f"alone {rows} x {context}: {shown}; usual {times['usual']:.1f}, bytes {floor_us:.1f} us")


LONG = {
    "64 x 4160": [4160] * 64,
    "64 of 64 to 8k": [64 + (i * 7919) % 8128 for i in range(64)],
    "16 x 4160": [4160] * 16,
    "32 x 4160": [4160] * 32,
    "128 x 2048": [2048] * 128,
    "8 x 16k": [16384] * 8,
}
LONG_BOUND = 1 << 15
"""Of a graph that rows of more than 4,096 tokens run in."""


def time_long_attention(report: Report) -> None:
    """How rows of long contexts are shared out, and stages and warps of that; 4 caches in turn."""
    heads = HeadShape(LLAMA_8B.heads, LLAMA_8B.kv_heads, LLAMA_8B.head_dim)
    num_shares = attention.NUM_SHARES
    for name, lengths in LONG.items():
        case = make_attention(lengths, heads, dtype=BF16, device="cuda")
        rows = replace(case.rows, max_kv_len=LONG_BOUND)
        caches = [case.kv_cache.clone() for _ in range(4)]
        scratch = AttentionScratch.allocate(heads, len(lengths), DEVICE)
        out = torch.zeros(len(lengths), heads.num_heads * heads.head_dim, device=DEVICE, dtype=BF16)
        chains: dict[str, list[Launch]] = {}
        for shares in (1, 256, 512, 1024, 1 << 20):  # 1: no row is split; the last: all are
            attention.NUM_SHARES = shares * heads.num_kv_heads if shares == 1 else shares
            usual = [k for c in caches for k in attention.attend(case.layer, case.qkv_ro, c, rows, scratch, out)]
            for stages, warps in ((3, 4), (4, 4), (4, 2), (5, 4)):
                chains[f"shares {shares} stages {stages} warps {warps}"] = [
                    replace(k, num_stages=stages, num_warps=warps) if k.kernel is attention_kernel else k for k in usual
                ]
        attention.NUM_SHARES = num_shares
        compile_together(launch for launches in chains.values() for launch in launches)
        times = {}
        for variant, launches in chains.items():
            graph = capture(lambda: [launch.run() for launch in launches])  # noqa: B023
            times[variant] = 1e3 * time_ms(graph, 3, 3) / 4
        report.results.append({"long attention": name, "us": times})
        shown = ", ".join(f"{k} {v:.1f}" for k, v in sorted(times.items(), key=lambda item: item[1])[:6])
        floor_us = sum(lengths) * 2 * heads.num_kv_heads * heads.head_dim * 2 / READ_BYTES_PER_S * 1e6
        worst = times["shares 1048576 stages 4 warps 4"]
        report.say(f"long {name}: {shown}; all split {worst:.1f}, bytes {floor_us:.1f} us")
        del chains, caches, case
        torch.cuda.empty_cache()


def print_table(rows: list[dict[str, Any]]) -> None:
    heads = f"{'fused ms':>9} {'plain ms':>9} {'floor ms':>9} {'of floor':>8}"
    print(f"{'model':14} {'rows':>4} {'context':>7} {'bound':>7} {heads}")
    for row in rows:
        plain = "-" if row["plain_ms"] is None else f"{row['plain_ms']:.3f}"
        share = f"{100 * row['floor_ms'] / row['fused_ms']:.0f}%"
        print(
            f"{row['model']:14} {row['rows']:4} {row['context']:7} {row['bound']:7} {row['fused_ms']:9.3f} {plain:>9}"
            f" {row['floor_ms']:9.3f} {share:>8}"
        )


PARTS: dict[str, list[Part]] = {
    "numerics": [check_products, check_repeats, check_attention],
    "models": [check_models],
    "timing": [time_models],
    "variants": [time_heads, time_attention_choices],
    "alone": [time_attention_alone],
    "long": [time_long_attention],
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("fused.json"))
    parser.add_argument("--parts", default="numerics,models,timing,variants")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--budget", type=float, default=230.0, help="seconds after which no further part is begun")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report()
    assert BLOCK_SIZE == attention.TILE
    table = run_parts(report, PARTS, args.parts, args.out, budget_s=args.budget, seed=args.seed)
    print_table(table)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
