"""Products with scales of 128 x 128 squares on a Hopper GPU: numerics against the reference on true shapes, rounding,
time beside channels' scales and cuBLAS's own blocks, tiles.

    PYTHONPATH=python python tests/kernels/gpu_squares.py --out squares.json [--parts numerics,models,products,steps]

Not run by default: "variants" times other tiles, "tune" tries configurations of decode steps in a chain of layers.
Prints every failure as it is found and tables last; the exit code is 1 if anything failed. `tests/run` does not run it
(no test_ prefix): it needs the GPU for itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from fused_models import LLAMA_8B
from fused_steps import relative_error
from gpu_fp8 import CHECKS, TUNED, capture_hidden, fused_case, random_matrix, step_of, tune_table
from gpu_fp8 import candidates as configurations
from gpu_fused import READ_BYTES_PER_S, config_of, product_shapes
from gpu_prefill import Rows, make_context, run, tokens_of
from gpu_report import Part, Report, capture, run_parts, time_ms
from torch import Tensor

from octavo.attention.base import make_backend
from octavo.kernels.reference.squares import (
    SIDE,
    dequantize_groups,
    dequantize_squares,
    num_groups,
    quantize_groups,
    quantize_squares,
)
from octavo.kernels.reference.squares import square_product as reference_product
from octavo.kernels.triton import square_gemm
from octavo.kernels.triton.launch import compile_together
from octavo.kernels.triton.quantize_rows import quantize_rows
from octavo.kernels.triton.skinny_table import SQUARES_TABLE, Config, Gemv
from octavo.kernels.triton.square_gemm import FEW_ROWS, Squares, Tile, choose_tile, square_launch, square_product
from octavo.layers.fused.decode import FusedDecode
from octavo.layers.quant.fp8 import Fp8Rows, rowwise, tensorwise
from octavo.layers.quant.stored import Quantization
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.models.weights import init_dummy_weights, linears_of

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
OPS = ("qkv", "o", "gate_up", "down")
ROWS = (1, 2, 16, 33, 64, 65, 200, 600, 2048)
TIMED = (1, 8, 32, 64, 128, 256, 2048, 8192)
ODD = (([576, 192, 192], 576), ([1536, 576], 7168), ([144], 208))
"""(output features of parts, input features): SmolLM2, DeepSeek-V3, and no multiple of anything."""
BLOCKS = {"squares": (SIDE, SIDE), "channels": None}
"""What a checkpoint says of each form."""
STEPS: dict[str, Rows] = {f"decode {rows} x 190": [(1, 190)] * rows for rows in (1, 64, 256)}
STEPS |= {"prefill 8 x 1024": [(1024, 1024)] * 8}


def make_matrix(sizes: list[int], k: int, share: int) -> Squares:
    """Parts of so many rows, stacked; their squares differ in size."""
    wide = [torch.randn(n, k, device=DEVICE) * k**-0.5 * (0.1 + torch.rand(n, 1, device=DEVICE)) for n in sizes]
    parts = [quantize_squares(part) for part in wide]
    scales = [
        scale.repeat_interleave(SIDE // share, 0)[: num_groups(n, share)]
        for n, (_, scale) in zip(sizes, parts, strict=True)
    ]
    numbers = torch.cat([number.view(torch.uint8) for number, _ in parts]).view(torch.float8_e4m3fn)
    return Squares(numbers, torch.cat(scales), share)


def shapes() -> dict[str, tuple[int, int]]:
    """(rows, columns) of Llama-3.1-8B's matrices."""
    return {op: ((2 if op == "gate_up" else 1) * n, k) for op, (n, k) in product_shapes(LLAMA_8B).items() if op in OPS}


def check_quantization(report: Report) -> None:
    """The kernel may divide a little otherwise than the reference."""
    for rows, width in ((1, 64), (7, 576), (300, 14336)):
        x = torch.randn(rows, width, device=DEVICE, dtype=BF16) * 3
        x[rows // 2, : width // 4] = 0
        number, scale = quantize_rows(x, group=SIDE)
        expected, expected_scale = quantize_groups(x)
        report.check(f"scales {rows} x {width}", relative_error(scale, expected_scale), 1e-6)
        differ = (number.view(torch.uint8) != expected.view(torch.uint8)).float().mean().item()
        report.check(f"numbers {rows} x {width} that differ", differ, 2e-3)
        report.check(f"values {rows} x {width}", relative_error(dequantize_groups(number, scale), x), 0.035)


def check_products(report: Report) -> None:
    """Wide rows are exact but for bf16's rounding of the result; rows in e4m3 against the same numbers in fp32. With
    tensor memory accelerator and without."""
    cases = [(op, make_matrix([n], k, SIDE)) for op, (n, k) in shapes().items()]
    cases += [(str(sizes), make_matrix(sizes, k, 64 if len(sizes) > 1 else SIDE)) for sizes, k in ODD]
    for name, matrix in cases:
        n, k = matrix.number_nk.shape
        bias = torch.randn(n, device=DEVICE, dtype=BF16)
        for rows in ROWS:
            x: Any = torch.randn(rows, k, device=DEVICE, dtype=BF16)
            if rows > FEW_ROWS:
                x = quantize_rows(x, group=SIDE)
            expected = reference_product(x, matrix.number_nk, matrix.scale_sg, bias, matrix.share)
            report.check(f"{name} {rows} rows", relative_error(square_product(x, matrix, bias, BF16), expected), 4e-3)
            y = torch.full((rows, n), torch.nan, device=DEVICE, dtype=BF16)
            square_launch(x, matrix, bias, y, tma=False).run(pdl=False)
            report.check(f"{name} {rows} rows by pointers", relative_error(y, expected), 4e-3)
            once = square_product(x, matrix, bias, BF16)
            differ = sum((square_product(x, matrix, bias, BF16) != once).any().item() for _ in range(5))
            report.check(f"{name} {rows} rows, 5 repeats that differ", differ, 0.5)
    report.say("products checked")


def cublas(x: tuple[Tensor, Tensor], matrix: Squares) -> Tensor:
    """cuBLAS's product of rows in groups with squares."""
    number_mk, scale_gm = x
    return torch._scaled_mm(
        number_mk,
        matrix.number_nk.t(),
        scale_a=scale_gm.t(),
        scale_b=matrix.scale_sg.t(),
        out_dtype=BF16,
        use_fast_accum=False,
    )


def check_cublas(report: Report) -> None:
    """What cuBLAS accepts and how exact it is."""
    for name, n, k in [(op, n, k) for op, (n, k) in shapes().items()] + [("576", 576, 1536), ("192", 192, 576)]:
        matrix = make_matrix([n], k, SIDE)
        for rows in (65, 128, 200, 300, 602, 2048):
            x = quantize_rows(torch.randn(rows, k, device=DEVICE, dtype=BF16), group=SIDE)
            expected = reference_product(x, matrix.number_nk, matrix.scale_sg, None, matrix.share)
            try:
                report.say(f"cublas {name} {rows} rows: {relative_error(cublas(x, matrix), expected):.5f}")
            except (RuntimeError, ValueError) as error:
                report.say(f"cublas {name} {rows} rows: {error!s:.160}")


@torch.inference_mode()
def time_products(report: Report) -> list[str]:
    """A product and the quantization of its rows, us, beside channels' scales and cuBLAS with squares (its product
    alone); share of the read ceiling for few rows, TFLOP/s for many."""
    lines = [f"{'product':8} {'rows':>5} {'squares':>8} {'channels':>8} {'cublas':>8}  ceiling"]
    for op, (n, k) in shapes().items():
        copies = max(1, (200 << 20) // (n * k))
        channels = [random_matrix(n, k) for _ in range(copies)]
        scales = torch.rand(num_groups(n), num_groups(k), device=DEVICE)
        squares = [Squares(number, scales) for number, _ in channels]
        for rows in TIMED:
            x = torch.randn(rows, k, device=DEVICE, dtype=BF16)
            grouped = quantize_rows(x, group=SIDE)

            def in_squares(x: Tensor, matrices: list[Squares]) -> None:
                for matrix in matrices:
                    some: Any = x if x.shape[0] <= FEW_ROWS else quantize_rows(x, group=SIDE)
                    square_product(some, matrix, None, BF16)

            def in_channels(x: Tensor, matrices: list[tuple[Tensor, Tensor]]) -> None:
                multiply = rowwise if x.shape[0] > FEW_ROWS else tensorwise
                for number, scale in matrices:
                    multiply(Fp8Rows(*quantize_rows(x)), number, scale, None)

            runs: dict[str, Callable[[], Any]] = {
                "squares": partial(in_squares, x, squares),
                "channels": partial(in_channels, x, channels),
                "cublas": partial(lambda x, ms: [cublas(x, m) for m in ms], grouped, squares),
            }
            times: dict[str, float] = {}
            for name, multiply_all in runs.items():
                try:
                    times[name] = 1e3 * time_ms(capture(multiply_all), 5, 3) / copies
                except RuntimeError as error:  # cuBLAS has no kernel for some numbers of rows
                    report.say(f"{op}, {rows} rows, {name}: {error!s:.120}")
            report.results.append({"product": op, "rows": rows, "us": times})
            share = 1e6 * n * k / READ_BYTES_PER_S / times["squares"]
            tera = 2e-6 * n * k * rows / times["squares"]
            rate = f"{100 * share:.0f}% of bytes" if rows <= FEW_ROWS else f"{tera:.0f} TF/s"
            shown = " ".join(f"{times.get(name, float('nan')):8.1f}" for name in runs)
            lines.append(f"{op:8} {rows:5} {shown}  {rate}")
        del channels, squares
        torch.cuda.empty_cache()
    return lines


def make_model(form: str, layers: int) -> Decoder:
    """Llama-3.1-8B with dummy weights in a form of BLOCKS."""
    stored = Quantization("fp8", BLOCKS[form], ("",), ())
    config = replace(config_of(LLAMA_8B, layers), quantization=stored)
    model = build_model(config, dtype=BF16, device=DEVICE, quantization="fp8")
    assert isinstance(model, Decoder)
    init_dummy_weights(model, 0)
    model.set_attention_backend(make_backend("triton"))
    return model


@torch.inference_mode()
def check_models(report: Report) -> None:
    """Distance of two layers to fp32 with the same weights, and activations rounded where the model rounds them, or not;
    as a graph too."""
    model = make_model("squares", 2)
    for layer in linears_of(model):
        assert layer.weight_scale is not None
        layer.weight_scale.uniform_(0.5 * layer.weight_scale[0, 0].item(), 1.5 * layer.weight_scale[0, 0].item())
        layer.method.finish(layer)
    exact = build_model(config_of(LLAMA_8B, 2), dtype=torch.float32, device=DEVICE, decode_kernels="plain")
    assert isinstance(exact, Decoder)
    exact.set_attention_backend(make_backend("reference"))
    source = {name: parameter for name, parameter in model.named_parameters() if not name.endswith("weight_scale")}
    for name, parameter in exact.named_parameters():
        parameter.copy_(source[name].float())
    for wide, layer in zip(linears_of(exact), linears_of(model), strict=True):
        assert layer.weight_scale is not None
        wide.weight.copy_(dequantize_squares(layer.weight, layer.weight_scale, layer.share))
    for case, rows in CHECKS.items():
        ctx = make_context(LLAMA_8B, rows, 2)
        token_id_t = tokens_of(LLAMA_8B, ctx)
        wide_ctx = replace(ctx, kv_cache=[cache.float() for cache in ctx.kv_cache], scratch={})
        found = run(model, token_id_t, ctx)
        unrounded_ctx = replace(wide_ctx, kv_cache=[cache.clone() for cache in wide_ctx.kv_cache], scratch={})
        unrounded = relative_error(found, run(exact, token_id_t, unrounded_ctx))
        least = 2 if ctx.max_query_len == 1 else FEW_ROWS + 1
        hooks = [layer.register_forward_pre_hook(round_input) for layer in linears_of(exact) if ctx.num_tokens >= least]
        error = relative_error(found, run(exact, token_id_t, wide_ctx))
        for hook in hooks:
            hook.remove()
        report.say(f"{case}: error to fp32 {error:.4f}, {unrounded:.4f} with activations that are not rounded")
        report.check(f"{case} hidden", error, 0.03)
        caches = max(relative_error(a, b) for a, b in zip(ctx.kv_cache, wide_ctx.kv_cache, strict=True))
        report.check(f"{case} cache", caches, 0.03)
        replayed = capture_hidden(model, token_id_t, ctx)
        report.check(f"{case} graph differs", (replayed != run(model, token_id_t, ctx)).float().sum().item(), 0.5)


def round_input(layer: Any, args: tuple[Tensor]) -> Tensor:
    """What a layer's input is once it is quantized by groups."""
    (x,) = args
    return dequantize_groups(*quantize_groups(x))


@torch.inference_mode()
def time_steps(report: Report) -> list[str]:
    """Whole steps of Llama-3.1-8B as graphs, all layers in squares or in channels' scales, ms."""
    found: dict[str, dict[str, float]] = {case: {} for case in STEPS}
    for form in ("squares", "channels"):
        model = make_model(form, LLAMA_8B.layers)
        for case, rows in STEPS.items():
            longest = max(length for _, length in rows)
            ctx = make_context(LLAMA_8B, rows, LLAMA_8B.layers, 256 if longest <= 256 else 4096)
            token_id_t = tokens_of(LLAMA_8B, ctx)
            if isinstance(model.decode_kernels, FusedDecode) and model.decode_kernels.accepts(ctx):
                compile_together(model.decode_kernels.launches(token_id_t, ctx))
            found[case][form] = time_ms(capture(step_of(model, ctx, token_id_t)), repeats=5, inner=3)
            del ctx
            torch.cuda.empty_cache()
        report.say(f"steps in {form} timed")
        del model
        torch.cuda.empty_cache()
    report.results += [{"step": case} | times for case, times in found.items()]
    lines = [f"{'step':18} {'squares':>8} {'channels':>8} ms"]
    return lines + [f"{case:18} {x['squares']:8.3f} {x['channels']:8.3f}" for case, x in found.items()]


def candidates(rows: int) -> list[Tile]:
    """Tiles worth a try."""
    if rows > FEW_ROWS:
        sizes = product((64, 128), (64, 128), (3, 4, 5), (4, 8))
        return [Tile(m, n, stages, warps, False) for m, n, stages, warps in sizes if m * n <= 2048 * warps]
    m = max(16, 1 << (rows - 1).bit_length())
    return [Tile(m, n, stages, 4, True) for n, stages in product((32, 64), (4, 6, 8)) if stages * (n + 2 * m) <= 1600]


@torch.inference_mode()
def time_variants(report: Report) -> list[str]:
    """Each product with other tiles, us, the fastest first."""
    lines = []
    for op, (n, k) in shapes().items():
        copies = max(1, (200 << 20) // (n * k))
        scales = torch.rand(num_groups(n), num_groups(k), device=DEVICE)
        squares = [Squares(random_matrix(n, k)[0], scales) for _ in range(copies)]
        for rows in (8, 64, 256, 8192):
            x: Any = torch.randn(rows, k, device=DEVICE, dtype=BF16)
            x = x if rows <= FEW_ROWS else quantize_rows(x, group=SIDE)
            usual = choose_tile(rows, n, 2 if rows <= FEW_ROWS else 1)
            times = {}
            for tile in dict.fromkeys((usual, *candidates(rows))):
                square_gemm.choose_tile = lambda *_, tile=tile: tile
                multiply_all = partial(lambda x, ms: [square_product(x, m, None, BF16) for m in ms], x, squares)
                try:
                    times[str(tile)] = 1e3 * time_ms(capture(multiply_all), 5, 3) / copies
                except Exception as error:  # too much shared memory
                    report.say(f"{tile}: {error!s:.80}")
            square_gemm.choose_tile = choose_tile
            best = sorted(times.items(), key=lambda item: item[1])[:3]
            report.results.append({"variants": op, "rows": rows, "us": times})
            fastest = "; ".join(f"{us:.1f} {tile}" for tile, us in best)
            lines.append(f"{op:8} {rows:5} {times.get(str(usual), 0):7.1f} now; {fastest}")
        del squares
        torch.cuda.empty_cache()
    return lines


def check_fused(report: Report) -> None:
    """Products of decode steps; those in parts of k give the same bits whoever arrives last."""
    cases = [(op, *product_shapes(LLAMA_8B)[op], rows, SIDE) for op in OPS for rows in (1, 2, 16, 17, 33, 64, 100, 128)]
    made = [fused_case(*case)[0] for case in cases]
    report.say(f"{compile_together(launch for launches in made for launch in launches)} kernels compiled")
    del made
    for case in cases:
        launches, outputs = fused_case(*case)
        for launch in launches:
            launch.run()
        for actual, expected in outputs():
            report.check(f"fused {case}", relative_error(actual, expected), 8e-3)
    launches, outputs = fused_case("down", *product_shapes(LLAMA_8B)["down"], 64, SIDE)
    residual = outputs()[0][0]
    before, seen = residual.clone(), None
    different = torch.zeros((), device=DEVICE)
    for _ in range(100):
        residual.copy_(before)
        for launch in launches:
            launch.run()
        seen = residual.clone() if seen is None else seen
        different += (seen != residual).any()
    report.check("down 100 repeats that differ", different.item(), 0.5)


def tune(report: Report) -> list[str]:
    """Configurations of decode steps."""

    def tries(op: str, n: int, k: int, bucket: int) -> list[Config]:
        more = [(8, 2048, 4), (8, 1024, 8), (16, 1024, 8), (16, 1024, 4), (4, 4096, 4), (4, 2048, 8), (8, 4096, 8)]
        found = [*configurations(op, n, k, bucket), *(Gemv(*size) for size in more if bucket == 1)]
        return [c for c in found if SIDE % c.block_n == 0]

    return tune_table(report, SQUARES_TABLE, lambda: make_model("squares", 8), tries)


PARTS: dict[str, list[Part]] = {
    "numerics": [check_quantization, check_products, check_cublas, check_fused],
    "models": [check_models],
    "products": [time_products],
    "steps": [time_steps],
    "variants": [time_variants],
    "tune": [tune],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="numerics,models,products,steps")
    parser.add_argument("--tune-rows", default=",".join(map(str, TUNED.values())), help="what to tune for")
    options = parser.parse_args()
    for bucket in [b for b, rows in TUNED.items() if str(rows) not in options.tune_rows.split(",")]:
        del TUNED[bucket]
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report()
    print(*run_parts(report, PARTS, options.parts, options.out), sep="\n")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
