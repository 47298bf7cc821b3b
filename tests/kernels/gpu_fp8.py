"""fp8 on a Hopper GPU: numerics of its products, a model against fp32 on the same rounded weights, and time.

    PYTHONPATH=python python tests/kernels/gpu_fp8.py --out fp8.json [--parts numerics,models,steps,products]

Not run by default: "grouped" times products with scales of groups. gpu_tune.py tries configurations. Prints every
failure as it is found and tables last; the exit code is 1 if anything failed. `tests/run` does not run it (no test_
prefix): it needs the GPU for itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fused_models import LLAMA_8B, Sizes
from fused_steps import relative_error
from gpu_fused import READ_BYTES_PER_S, config_of, product_shapes
from gpu_prefill import Rows, make_context, run, shares, step_flop, tokens_of
from gpu_report import Part, Report, capture, run_parts, time_ms
from torch import Tensor
from torch.nn import functional as F

from octavo.attention.base import ForwardContext, make_backend
from octavo.kernels.reference.quantize_rows import dequantize_rows
from octavo.kernels.reference.quantize_rows import quantize_rows as reference_quantize
from octavo.kernels.reference.quantize_rows import quantize_weights as reference_weights
from octavo.kernels.reference.skinny_linear import add_linear, gated_linear, linear
from octavo.kernels.reference.squares import dequantize_groups, dequantize_squares, num_groups, quantize_groups
from octavo.kernels.triton.launch import Launch, compile_together
from octavo.kernels.triton.quantize_rows import quantize_rows, quantize_weights
from octavo.kernels.triton.skinny_linear import (
    QuantizedRows,
    ResidualStream,
    SkinnyLinear,
    SplitScratch,
    add_residual,
    quantized,
    scaled_store,
)
from octavo.kernels.triton.skinny_table import bucket_for
from octavo.layers.fused.decode import FusedDecode
from octavo.layers.quant.fp8 import Fp8Rows, rowwise, tensorwise
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.models.weights import linears_of

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
ROWS = (1, 8, 33, 64, 128)
CHECKS: dict[str, Rows] = {f"decode {rows}": [(1, 1 + (i * 131) % 700) for i in range(rows)] for rows in (*ROWS, 200)}
CHECKS |= {"prefill 40": [(40, 40)], "prefill 1 x 2048": [(2048, 2048)]}
STEPS: dict[str, Rows] = {f"decode {rows} x 190": [(1, 190)] * rows for rows in (1, 8, 32, 64, 128, 256)}
STEPS |= {"prefill 1 x 2048": [(2048, 2048)], "prefill 8 x 1024": [(1024, 1024)] * 8}
OPS = ("qkv", "o", "gate_up", "down")


# --- products


def random_matrix(rows: int, k: int) -> tuple[Tensor, Tensor]:
    """(e4m3 numbers, scales) with channels of different sizes."""
    return reference_quantize(
        torch.randn(rows, k, device=DEVICE) * k**-0.5 * (0.1 + torch.rand(rows, 1, device=DEVICE))
    )


def check_quantization(report: Report) -> None:
    """The kernel may divide a little otherwise than the reference: next to a border a number may round to the other
    side."""
    for rows, width in ((1, 64), (7, 576), (64, 4096), (300, 14336), (8192, 4096)):
        x = torch.randn(rows, width, device=DEVICE, dtype=BF16) * 3
        x[rows // 2, :7] = 0
        number, scale = quantize_rows(x)
        expected, expected_scale = reference_quantize(x)
        report.check(f"scales {rows} x {width}", relative_error(scale, expected_scale), 1e-6)
        differ = (number.view(torch.uint8) != expected.view(torch.uint8)).float().mean().item()
        report.check(f"numbers {rows} x {width} that differ", differ, 2e-3)
        report.check(f"values {rows} x {width}", relative_error(dequantize_rows(number, scale), x), 0.035)


def check_weights(report: Report) -> None:
    """The kernel's scales against the reference's: where two scales are equally good, either may be taken."""
    for rows, width in ((64, 576), (256, 4096), (16, 14336)):
        weight = (torch.randn(rows, width, device=DEVICE) * torch.rand(rows, 1, device=DEVICE)).to(BF16)
        weight[3] = 0
        found, expected = quantize_weights(weight), reference_weights(weight)
        errors = [(dequantize_rows(*pair) - weight.float()).norm(dim=1) for pair in (found, expected)]
        report.check(f"error of weights {rows} x {width}", relative_error(*errors), 1e-3)
        differ = ((found[1] / expected[1] - 1).abs() > 1e-5).float().mean().item()
        report.check(f"scales of weights {rows} x {width} that differ", differ, 0.05)


def fused_case(
    op: str, n: int, k: int, rows: int, share: int = 0
) -> tuple[list[Launch], Callable[[], list[tuple[Tensor, Tensor]]]]:
    """A product's launches, and (actual, expected) after they ran. What is expected is multiplied in fp32, with x
    quantized by the reference where the product quantizes it. `share`: the matrix has scales of squares."""
    number, scale = random_matrix(2 * n if op == "gate_up" else n, k)
    if share:
        scale = scale.mean() * (0.5 + torch.rand(num_groups(number.shape[0], share), num_groups(k), device=DEVICE))
    bias = torch.randn(number.shape[0], device=DEVICE, dtype=BF16)
    product = SkinnyLinear.make(op, number, bias, scale, QuantizedRows.allocate(k, DEVICE), share)
    matrix = dequantize_squares(number, scale, share) if share else dequantize_rows(number, scale)

    def rounded(x: Tensor) -> Tensor:
        if rows == 1:
            return x.float()
        return dequantize_groups(*quantize_groups(x)) if share else dequantize_rows(*reference_quantize(x))

    if op in ("o", "down"):
        x, gain = torch.randn(rows, k, device=DEVICE, dtype=BF16), torch.ones(n, device=DEVICE, dtype=BF16)
        stream, split = ResidualStream.allocate(n, BF16, DEVICE), SplitScratch.allocate([product], DEVICE)
        stream.residual_mn.normal_()
        before = stream.residual_mn[:rows].clone()
        launches = [*quantized(product, x), add_residual(product, x, stream, gain, split)]
        return launches, lambda: [(stream.residual_mn[:rows], add_linear(before, rounded(x), matrix, bias))]
    stream = ResidualStream.allocate(k, BF16, DEVICE)
    x = torch.randn(rows, k, device=DEVICE, dtype=BF16) * 3
    gain = 0.5 + torch.rand(k, device=DEVICE)
    stream.gained_mn[:rows] = x.float() * gain
    stream.squares_f[: bucket_for(rows)][:rows] = x.float().square().sum(1)
    y = torch.full((rows, n), torch.nan, device=DEVICE, dtype=BF16)
    epilogue = "silu" if op == "gate_up" else "store"
    gained = stream.gained_mn[:rows]
    launches = [*quantized(product, gained), scaled_store(product, stream, y, partials=1, epilogue=epilogue, eps=1e-5)]

    def outputs() -> list[tuple[Tensor, Tensor]]:
        normed = rounded(gained) * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return [(y, (gated_linear if op == "gate_up" else linear)(normed, matrix, bias))]

    return launches, outputs


def check_products(report: Report) -> None:
    cases = [(op, *product_shapes(LLAMA_8B)[op], rows) for op in OPS for rows in (1, 2, 8, 16, 17, 33, 64, 100, 128)]
    made = {case: fused_case(*case) for case in cases if case[3] in (1, 8, 17, 64, 100)}
    report.say(f"{compile_together(x for launches, _ in made.values() for x in launches)} kernels compiled")
    del made
    for case in cases:
        launches, outputs = fused_case(*case)
        for launch in launches:
            launch.run()
        for actual, expected in outputs():
            report.check(f"fused {case}", relative_error(actual, expected), 8e-3)
    for op in OPS:
        n, k = product_shapes(LLAMA_8B)[op]
        number, scale = random_matrix(n, k)
        for rows in (1, 8, 33, 64, 65, 128, 2048):
            x = torch.randn(rows, k, device=DEVICE, dtype=BF16)
            bias = torch.randn(n, device=DEVICE, dtype=BF16)
            quantized_x = Fp8Rows(*quantize_rows(x))
            expected = linear(dequantize_rows(*quantized_x), dequantize_rows(number, scale), bias)
            for multiply in (rowwise, tensorwise):
                actual = multiply(quantized_x, number, scale, bias)
                report.check(f"{multiply.__name__} {op} {rows} rows", relative_error(actual, expected), 8e-3)
    report.say("products checked")


def check_repeats(report: Report) -> None:
    """Split products give the same bits whoever arrives last."""
    launches, outputs = fused_case("down", *product_shapes(LLAMA_8B)["down"], 64)
    residual = outputs()[0][0]
    before, seen = residual.clone(), None
    different = torch.zeros((), device=DEVICE)
    for _ in range(300):
        residual.copy_(before)
        for launch in launches:
            launch.run()
        seen = residual.clone() if seen is None else seen
        different += (seen != residual).any()
    report.check("down 300 repeats that differ", different.item(), 0.5)


# --- whole models


@torch.inference_mode()
def make_model(sizes: Sizes, layers: int, quantization: str = "fp8", kernels: str = "fused") -> Decoder:
    """Random weights that keep their input's size."""
    config = config_of(sizes, layers)
    model = build_model(config, dtype=BF16, device=DEVICE, decode_kernels=kernels, quantization=quantization)
    assert isinstance(model, Decoder)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        elif parameter.dtype == BF16:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    model.embed.weight.normal_()
    for layer in linears_of(model):
        if layer.weight_scale is not None:
            number, scale = reference_quantize(torch.randn(layer.weight.shape, device=DEVICE) * layer.in_features**-0.5)
            layer.weight.copy_(number)
            layer.weight_scale.copy_(scale)
    model.set_attention_backend(make_backend("triton"))
    return model


@torch.inference_mode()
def widened(model: Decoder, sizes: Sizes, layers: int) -> Decoder:
    """The fp32 model with the same weights, run by plain modules."""
    exact = build_model(config_of(sizes, layers), dtype=torch.float32, device=DEVICE, decode_kernels="plain")
    assert isinstance(exact, Decoder)
    exact.set_attention_backend(make_backend("reference"))
    source = {name: parameter for name, parameter in model.named_parameters() if not name.endswith("weight_scale")}
    for name, parameter in exact.named_parameters():
        parameter.copy_(source[name].float())
    for wide, layer in zip(linears_of(exact), linears_of(model), strict=True):
        if layer.weight_scale is not None:
            wide.weight.copy_(dequantize_rows(layer.weight, layer.weight_scale))
    return exact


@torch.inference_mode()
def check_models(report: Report) -> None:
    """Distance to fp32: one row keeps bf16 activations, all others round them to e4m3."""
    layers = 2
    model = make_model(LLAMA_8B, layers)
    exact = widened(model, LLAMA_8B, layers)
    for case, rows in CHECKS.items():
        ctx = make_context(LLAMA_8B, rows, layers)
        token_id_t = tokens_of(LLAMA_8B, ctx)
        wide = replace(ctx, kv_cache=[cache.float() for cache in ctx.kv_cache], scratch={})
        twin = replace(ctx, kv_cache=[cache.clone() for cache in ctx.kv_cache], scratch={})
        expected = run(exact, token_id_t, wide)
        found = run(model, token_id_t, ctx).clone()
        kernels, model.decode_kernels = model.decode_kernels, None
        modules = run(model, token_id_t, twin)
        model.decode_kernels = kernels
        errors = [relative_error(x, expected) for x in (found, modules)]
        last = ctx.query_start_r[1:].long() - 1
        logits = [m.logits(x[last]) for m, x in ((model, found), (exact, expected))]
        divergence = F.kl_div(
            logits[0].log_softmax(-1), logits[1].log_softmax(-1), log_target=True, reduction="batchmean"
        )
        report.say(f"{case}: error to fp32 {errors[0]:.4f}, of modules {errors[1]:.4f}; KL {divergence.item():.2e}")
        report.results.append({"model": case, "error": errors[0], "modules": errors[1], "kl": divergence.item()})
        report.check(f"{case} hidden", errors[0], 0.01 if rows[0] == (1, 1) and len(rows) == 1 else 0.06)
        report.check(f"{case} modules", errors[1], 0.06)
        caches = max(relative_error(a, b) for a, b in zip(ctx.kv_cache, wide.kv_cache, strict=True))
        report.check(f"{case} cache", caches, 0.06)
        replayed = capture_hidden(model, token_id_t, ctx)
        report.check(f"{case} graph differs", (replayed != run(model, token_id_t, ctx)).float().sum().item(), 0.5)
    del model, exact
    torch.cuda.empty_cache()


def capture_hidden(model: Decoder, token_id_t: Tensor, ctx: ForwardContext) -> Tensor:
    """Hidden states of the step as a graph."""
    out: list[Tensor] = []
    graph = capture(lambda: out.append(run(model, token_id_t, ctx)))
    graph.replay()
    return out[-1].clone()


def floor_ms(sizes: Sizes, rows: Rows, weight_bytes: int) -> float:
    """Time to read weights (the head's in bf16) and KV once."""
    layer = sum(n * k * (2 if op == "gate_up" else 1) for op, (n, k) in product_shapes(sizes).items() if op != "head")
    kv = sum(length for _, length in rows) * 2 * sizes.layers * sizes.kv_heads * sizes.head_dim
    num_bytes = weight_bytes * sizes.layers * layer + 2 * sizes.vocab * sizes.hidden + 2 * kv
    return num_bytes / READ_BYTES_PER_S * 1e3


def step_of(model: Decoder, ctx: ForwardContext, token_id_t: Tensor) -> Callable[[], Tensor]:
    """The step from token ids to logits of each row's last token."""
    last_r = None if ctx.num_rows == ctx.num_tokens else ctx.query_start_r[1:].long() - 1

    def step() -> Tensor:
        hidden = run(model, token_id_t, ctx)
        return model.logits(hidden if last_r is None else hidden[last_r])

    return step


@torch.inference_mode()
def time_steps(report: Report) -> list[str]:
    """Whole steps as graphs, embedding to logits of last tokens, in bf16 and in fp8."""
    found: dict[str, dict[str, Any]] = {case: {} for case in STEPS}
    for quantization, item in (("none", 2), ("fp8", 1)):
        model = make_model(LLAMA_8B, LLAMA_8B.layers, quantization)
        for case, rows in STEPS.items():
            length = max(length for _, length in rows)
            ctx = make_context(LLAMA_8B, rows, LLAMA_8B.layers, next(b for b in (256, 4096) if b >= length))
            token_id_t = tokens_of(LLAMA_8B, ctx)
            step = step_of(model, ctx, token_id_t)
            if isinstance(model.decode_kernels, FusedDecode) and model.decode_kernels.accepts(ctx):
                compile_together(model.decode_kernels.launches(token_id_t, ctx))
            ms = time_ms(capture(step), repeats=5, inner=3)
            found[case] |= {f"{quantization}_ms": ms, f"{quantization}_floor_ms": floor_ms(LLAMA_8B, rows, item)}
            found[case][f"{quantization}_tflops"] = step_flop(LLAMA_8B, rows) / ms / 1e9
            if quantization == "fp8":
                found[case][f"{quantization}_shares"] = shares(step)
            del ctx
            torch.cuda.empty_cache()
        report.say(f"steps in {quantization} timed")
        del model, step
        torch.cuda.empty_cache()
    report.results += [{"step": case} | values for case, values in found.items()]
    lines = [f"{'step':18} {'bf16 ms':>8} {'fp8 ms':>8} {'floor':>6} {'TF/s':>5}  parts of fp8, ms"]
    for case, x in found.items():
        times = f"{x['none_ms']:8.3f} {x['fp8_ms']:8.3f} {x['fp8_floor_ms']:6.2f} {x['fp8_tflops']:5.0f}"
        lines.append(f"{case:18} {times}  {x['fp8_shares']}")
    return lines


GROUP = 128
"""Features that share a scale in cuBLAS's blockwise products."""


def grouped_scales(rows: int, k: int) -> Tensor:
    """Ones [rows, k / GROUP], by columns, as cuBLAS wants the scales of groups of a row."""
    return torch.ones(k // GROUP, rows, device=DEVICE).t()


def by_groups(x: Fp8Rows, weight: Tensor, squares: bool) -> Tensor:
    """A product with scales of groups of x, and of squares or groups of W (ones: for its time only)."""
    (n, k), rows = weight.shape, x.number_ti.shape[0]
    scale_b = torch.ones(n // GROUP, k // GROUP, device=DEVICE).t() if squares else grouped_scales(n, k).t()
    return torch._scaled_mm(
        x.number_ti,
        weight.t(),
        scale_a=grouped_scales(rows, k),
        scale_b=scale_b,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


@torch.inference_mode()
def time_grouped(report: Report) -> list[str]:
    """What scales of groups of 128 features cost in cuBLAS, us, beside a scale a row."""
    lines = [f"{'product':8} {'rows':>5} {'rowwise':>8} {'groups x squares':>17} {'groups x groups':>16}"]
    for op in OPS:
        n, k = product_shapes(LLAMA_8B)[op]
        n *= 2 if op == "gate_up" else 1
        copies = max(1, (200 << 20) // (n * k))
        matrices = [random_matrix(n, k) for _ in range(copies)]
        for rows in (256, 2048, 8192):
            x = Fp8Rows(*quantize_rows(torch.randn(rows, k, device=DEVICE, dtype=BF16)))
            runs: dict[str, Callable[[], Any]] = {
                "rowwise": partial(lambda x, ws: [rowwise(x, w, s, None) for w, s in ws], x, matrices)
            }
            for squares in (True, False):
                name = "squares" if squares else "groups"
                runs[name] = partial(lambda x, ws, q: [by_groups(x, w, q) for w, _ in ws], x, matrices, squares)
            times: dict[str, float] = {}
            for name, step in runs.items():
                try:
                    times[name] = 1e3 * time_ms(capture(step), 5, 3) / copies
                except RuntimeError as error:  # a kind that this cuBLAS has no kernel for
                    report.say(f"{op}, {rows} rows, {name}: {error!s:.150}")
            report.results.append({"grouped": op, "rows": rows, "us": times})
            shown = (f"{times.get(name, float('nan')):16.1f}" for name in runs)
            lines.append(f"{op:8} {rows:5} {' '.join(shown)}")
        del matrices
        torch.cuda.empty_cache()
    return lines


@torch.inference_mode()
def time_products(report: Report) -> list[str]:
    """What a product of many rows takes, us: bf16, its quantization alone, and scaled products of both kinds."""
    lines = [f"{'product':8} {'rows':>5} {'bf16':>8} {'quantize':>8} {'rowwise':>8} {'tensorwise':>10}"]
    for op in OPS:
        n, k = product_shapes(LLAMA_8B)[op]
        n *= 2 if op == "gate_up" else 1
        copies = max(1, (200 << 20) // (n * k))
        matrices = [random_matrix(n, k) for _ in range(copies)]
        dense = [number.to(BF16) for number, _ in matrices]
        for rows in (16, 64, 128, 192, 256, 512, 1024, 2048, 8192):
            x = torch.randn(rows, k, device=DEVICE, dtype=BF16)
            quantized_x = Fp8Rows(*quantize_rows(x))
            runs: dict[str, Callable[[], Any]] = {
                "bf16": partial(lambda x, ws: [F.linear(x, w) for w in ws], x, dense),
                "quantize": partial(lambda x, ws: [quantize_rows(x) for _ in ws], x, dense),
            }
            for multiply in (rowwise, tensorwise):
                runs[multiply.__name__] = partial(
                    lambda f, x, ws: [f(x, w, scale, None) for w, scale in ws], multiply, quantized_x, matrices
                )
            times = {name: 1e3 * time_ms(capture(step), 5, 3) / copies for name, step in runs.items()}
            report.results.append({"product": op, "rows": rows, "us": times})
            shown = f"{times['bf16']:8.1f} {times['quantize']:8.1f} {times['rowwise']:8.1f} {times['tensorwise']:10.1f}"
            lines.append(f"{op:8} {rows:5} {shown}")
            torch.cuda.empty_cache()
        del matrices, dense
    report.say("products timed")
    return lines


PARTS: dict[str, list[Part]] = {
    "numerics": [check_quantization, check_weights, check_products, check_repeats],
    "models": [check_models],
    "steps": [time_steps],
    "products": [time_products],
    "grouped": [time_grouped],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="numerics,models,steps,products")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report()
    print(*run_parts(report, PARTS, options.parts, options.out), sep="\n")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
