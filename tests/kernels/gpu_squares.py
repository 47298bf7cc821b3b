"""Products with scales of 128 x 128 squares on a Hopper GPU: numerics against the reference on true shapes, rounding,
time beside channels' scales and cuBLAS's own blocks, tiles.

    PYTHONPATH=python python tests/kernels/gpu_squares.py --out squares.json [--parts numerics,models,products,steps]

Not run by default: "variants" times other tiles. gpu_tune.py tries configurations of decode steps.
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
from gpu_fp8 import CHECKS, capture_hidden, fused_case, random_matrix, step_of
from gpu_fused import READ_BYTES_PER_S, config_of, product_shapes
from gpu_prefill import Rows, make_context, run, tokens_of
from gpu_report import Part, Report, capture, run_parts, time_ms
from gpu_tune import make_model
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
from octavo.kernels.triton.skinny_table import MAX_ROWS
from octavo.kernels.triton.square_gemm import (
    Squares,
    Tile,
    choose_tile,
    square_launch,
    square_product,
    takes_vector,
    vector_product,
)
from octavo.layers.fused.decode import FusedDecode
from octavo.layers.quant.fp8 import ROWWISE_TOKENS, Fp8Rows, rowwise, tensorwise
from octavo.layers.quant.fp8_squares import Fp8Groups, by_cublas, cublas_reads
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.models.weights import linears_of

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
OPS = ("qkv", "o", "gate_up", "down")
ROWS = (1, 2, 16, 33, 64, 65, 200, 600, 2048)
TIMED = (1, 8, 32, 64, 128, 256, 2048, 8192)
ODD = (([576, 192, 192], 576), ([1536, 576], 7168), ([144], 208), ([576], 1536), ([12288], 128), ([128], 4096))
"""(output features of parts, input features): SmolLM2, DeepSeek-V3, and no multiple of anything."""
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
    """Against the same numbers in fp32: exact but for bf16's rounding of the result. With tensor memory accelerator and
    without, and by cuBLAS where it takes the matrix."""
    cases = [(op, make_matrix([n], k, SIDE)) for op, (n, k) in shapes().items()]
    cases += [(str(sizes), make_matrix(sizes, k, 64 if len(sizes) > 1 else SIDE)) for sizes, k in ODD]
    for name, matrix in cases:
        n, k = matrix.number_nk.shape
        bias = torch.randn(n, device=DEVICE, dtype=BF16)
        for rows in ROWS:
            x: Any = torch.randn(rows, k, device=DEVICE, dtype=BF16)
            if rows == 1 and takes_vector(matrix):
                wide = reference_product(x, matrix.number_nk, matrix.scale_sg, bias, matrix.share)
                error = relative_error(vector_product(x, matrix, bias, BF16), wide)
                report.check(f"{name} one row", error, 4e-3)
            x = quantize_rows(x, group=SIDE)
            expected = reference_product(x, matrix.number_nk, matrix.scale_sg, bias, matrix.share)
            once = square_product(x, matrix, bias, BF16)
            report.check(f"{name} {rows} rows", relative_error(once, expected), 4e-3)
            y = torch.full((rows, n), torch.nan, device=DEVICE, dtype=BF16)
            square_launch(x, matrix, bias, y, tma=False).run(pdl=False)
            report.check(f"{name} {rows} rows by pointers", relative_error(y, expected), 4e-3)
            differ = sum((square_product(x, matrix, bias, BF16) != once).any().item() for _ in range(5))
            report.check(f"{name} {rows} rows, 5 repeats that differ", differ, 0.5)
            if cublas_reads(n, k, matrix.share):
                y = by_cublas(Fp8Groups(*x), matrix.number_nk, matrix.scale_sg, bias)
                report.check(f"{name} {rows} rows by cuBLAS", relative_error(y, expected), 4e-3)
    report.say("products checked")


@torch.inference_mode()
def time_products(report: Report) -> list[str]:
    """A product and the quantization of its rows, us: by the kernels for squares, by cuBLAS, and with channels' scales;
    what is the fastest for squares as a share of the read ceiling up to 128 rows, as TFLOP/s for more."""
    lines = [f"{'product':8} {'rows':>5} {'squares':>8} {'cublas':>8} {'channels':>8}"]
    for op, (n, k) in shapes().items():
        copies = max(1, (200 << 20) // (n * k))
        channels = [random_matrix(n, k) for _ in range(copies)]
        scales = torch.rand(num_groups(n), num_groups(k), device=DEVICE)
        squares = [Squares(number, scales) for number, _ in channels]
        for rows in TIMED:
            x = torch.randn(rows, k, device=DEVICE, dtype=BF16)

            def by_kernel(x: Tensor, matrices: list[Squares]) -> None:
                for matrix in matrices:
                    if x.shape[0] == 1:
                        vector_product(x, matrix, None, BF16)
                    else:
                        square_product(quantize_rows(x, group=SIDE), matrix, None, BF16)

            def in_cublas(x: Tensor, matrices: list[Squares]) -> None:
                for matrix in matrices:
                    by_cublas(Fp8Groups(*quantize_rows(x, group=SIDE)), matrix.number_nk, matrix.scale_sg, None)

            def in_channels(x: Tensor, matrices: list[tuple[Tensor, Tensor]]) -> None:
                multiply = rowwise if x.shape[0] >= ROWWISE_TOKENS else tensorwise
                for number, scale in matrices:
                    multiply(Fp8Rows(*quantize_rows(x)), number, scale, None)

            runs: dict[str, Callable[[], Any]] = {
                "squares": partial(by_kernel, x, squares),
                "cublas": partial(in_cublas, x, squares),
                "channels": partial(in_channels, x, channels),
            }
            times = {name: 1e3 * time_ms(capture(run), 5, 3) / copies for name, run in runs.items()}
            report.results.append({"product": op, "rows": rows, "us": times})
            best = min(times["squares"], times["cublas"])
            share, tera = 1e6 * n * k / READ_BYTES_PER_S / best, 2e-6 * n * k * rows / best
            rate = f"{100 * share:.0f}% of bytes" if rows <= MAX_ROWS else f"{tera:.0f} TF/s"
            shown = " ".join(f"{us:8.1f}" for us in times.values())
            lines.append(f"{op:8} {rows:5} {shown}  {rate}")
        del channels, squares
        torch.cuda.empty_cache()
    return lines


@torch.inference_mode()
def check_models(report: Report) -> None:
    """Distance of two layers to fp32 with the same weights, beside what rounding the activations does to fp32 (the same
    roundings don't give the same numbers: what is a little off goes to the other side); as a graph too."""
    model = make_model("squares", LLAMA_8B, 2)
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
        rounded_ctx = replace(wide_ctx, kv_cache=[cache.clone() for cache in wide_ctx.kv_cache], scratch={})
        expected = run(exact, token_id_t, wide_ctx)
        hooks = [layer.register_forward_pre_hook(round_input) for layer in linears_of(exact) if ctx.num_tokens > 1]
        rounded = relative_error(run(exact, token_id_t, rounded_ctx), expected)
        for hook in hooks:
            hook.remove()
        error = relative_error(found, expected)
        report.say(f"{case}: error to fp32 {error:.4f}, of fp32 with rounded activations {rounded:.4f}")
        report.check(f"{case} hidden", error, 1.1 * rounded + 0.01)
        caches = max(relative_error(a, b) for a, b in zip(ctx.kv_cache, wide_ctx.kv_cache, strict=True))
        wanted = max(relative_error(a, b) for a, b in zip(rounded_ctx.kv_cache, wide_ctx.kv_cache, strict=True))
        report.check(f"{case} cache", caches, 1.1 * wanted + 0.01)
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
        model = make_model(form, LLAMA_8B, LLAMA_8B.layers)
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
    if rows > 64:
        sizes = product((64, 128), (64, 128), (3, 4, 5), (4, 8))
        return [Tile(m, n, stages, warps, False) for m, n, stages, warps in sizes if m * n <= 2048 * warps]
    m = max(16, 1 << (rows - 1).bit_length())
    return [Tile(m, n, stages, 4, True) for n, stages in product((64, 128), (4, 6, 8)) if stages * (n + m) <= 1600]


@torch.inference_mode()
def time_variants(report: Report) -> list[str]:
    """Each product with other tiles, us, the fastest first."""
    lines = []
    for op, (n, k) in shapes().items():
        copies = max(1, (200 << 20) // (n * k))
        scales = torch.rand(num_groups(n), num_groups(k), device=DEVICE)
        squares = [Squares(random_matrix(n, k)[0], scales) for _ in range(copies)]
        for rows in (8, 64, 256, 8192):
            x = quantize_rows(torch.randn(rows, k, device=DEVICE, dtype=BF16), group=SIDE)
            usual = choose_tile(rows)
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


PARTS: dict[str, list[Part]] = {
    "numerics": [check_quantization, check_products, check_fused],
    "models": [check_models],
    "products": [time_products],
    "steps": [time_steps],
    "variants": [time_variants],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default="numerics,models,products,steps")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report()
    print(*run_parts(report, PARTS, options.parts, options.out), sep="\n")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
