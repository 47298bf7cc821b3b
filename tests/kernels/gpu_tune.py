"""Configurations of decode steps' products (kernels/triton/skinny_table.py), tried inside a chain of layers on a Hopper
GPU: alone, other configurations win.

    PYTHONPATH=python python tests/kernels/gpu_tune.py half|channels|squares --out tune.json \
        [--model llama|qwen] [--rows 1,8,32,64,128] [--ops down,gate_up,o,qkv,head]

For each number of rows, one product after another keeps the fastest; a table of them comes last, and what is faster
than the table's own goes into it by hand. gpu_ring.py tunes rings for many rows by coordinate descent with numerics.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from fused_models import LLAMA_8B, QWEN3_06B, Sizes
from gpu_fused import config_of, product_shapes
from gpu_prefill import make_context, tokens_of
from gpu_report import Report, capture, time_ms

from octavo.attention.base import make_backend
from octavo.kernels.reference.squares import SIDE
from octavo.kernels.triton.launch import compile_together
from octavo.kernels.triton.skinny_linear import ResidualStream, SkinnyLinear, store
from octavo.kernels.triton.skinny_table import (
    BUCKETS,
    FP8_TABLE,
    SHARED_BYTES,
    SQUARES_TABLE,
    TABLE,
    Config,
    Gemv,
    Ring,
    bucket_for,
    choose,
)
from octavo.layers.fused.decode import FusedDecode
from octavo.layers.quant.stored import Quantization
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.models.weights import init_dummy_weights

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
MODELS: dict[str, tuple[Sizes, int]] = {"llama": (LLAMA_8B, 8), "qwen": (QWEN3_06B, 28)}
"""Sizes, and layers of a chain."""
TABLES = {"half": TABLE, "channels": FP8_TABLE, "squares": SQUARES_TABLE}
BLOCKS = {"channels": None, "squares": (SIDE, SIDE)}
"""What a checkpoint says of each form."""
VECTOR_WARPS = {4: (4,), 8: (4,), 16: (4, 8), 32: (4, 8), 64: (8,)}
"""Warps by the KiB of a block of W, rows of gemv.py's."""


def make_model(form: str, sizes: Sizes, layers: int) -> Decoder:
    """A model with dummy weights, kept in a form."""
    stored = None if form == "half" else Quantization("fp8", BLOCKS[form], ("",), ())
    config = replace(config_of(sizes, layers), quantization=stored)
    quantization = "none" if form == "half" else "fp8"
    model = build_model(config, dtype=BF16, device=DEVICE, quantization=quantization)
    assert isinstance(model, Decoder)
    init_dummy_weights(model, 0)
    model.set_attention_backend(make_backend("triton"))
    return model


def vectors(item_bytes: int) -> Iterator[Gemv]:
    """For one row: blocks of 4 to 64 KiB."""
    for block_n, block_k in product((1, 2, 4, 8, 16), (512, 1024, 2048, 4096)):
        for warps in VECTOR_WARPS.get(block_n * block_k * item_bytes >> 10, ()):
            yield Gemv(block_n, block_k, warps)


def rings(op: str, bucket: int, item_bytes: int) -> Iterator[Ring]:
    """With as many stages as let one or two programs share a multiprocessor."""
    widths = (128, 256) if item_bytes == 1 else (64, 128)
    for block_n, block_k, split_k, swap in product((32, 64, 128), widths, (1, 2, 4), (True, False)):
        warps = 8 if block_n * bucket > 4096 else 4
        if (block_n if swap else bucket) < 16 * warps or (split_k > 1 and op not in ("o", "down")):
            continue
        one = Ring(bucket, block_n, block_k, split_k, 1, swap, warps).shared_bytes(op, item_bytes)
        for programs in (1, 2):
            stages = min((SHARED_BYTES // programs - 2048) // one, 8)
            if stages > 1:
                yield Ring(bucket, block_n, block_k, split_k, stages, swap, warps)


def candidates(form: str, op: str, n: int, k: int, bucket: int) -> list[Config]:
    """Configurations worth a try."""
    item_bytes = 2 if form == "half" or op == "head" else 1
    found: Iterator[Config] = vectors(item_bytes) if bucket == 1 else rings(op, bucket, item_bytes)
    return [c for c in found if c.fits(op, n, k, item_bytes) and (form != "squares" or SIDE % c.block_n == 0)]


@torch.inference_mode()
def tune_chain(report: Report, form: str, name: str, rows: int, ops: list[str]) -> list[str]:
    """The best configuration of each product in a chain of layers at context 190."""
    (sizes, layers), bucket, lines = MODELS[name], bucket_for(rows), []
    model = make_model(form, sizes, layers)
    ctx = make_context(sizes, [(1, 190)] * rows, layers, 256)
    token_id_t = tokens_of(sizes, ctx)
    for op in ops:
        n, k = product_shapes(sizes)[op]
        share = SIDE if form == "squares" else 0
        known = {b: choose(op, n, k, b, fp8=form != "half", share=share) for b in BUCKETS}
        table = TABLES[form].setdefault((op, n, k), {b: config for b, config in known.items() if config})
        old = table[bucket]
        tries = list(dict.fromkeys((old, *candidates(form, op, n, k, bucket))))
        decodes = []
        for config in tries:
            table[bucket] = config
            decodes.append(FusedDecode(model.weights()))
        compile_together(launch for decode in decodes for launch in decode.launches(token_id_t, ctx)[:12])
        times = {}
        for config, decode in zip(tries, decodes, strict=True):
            times[config] = 1e3 * time_ms(capture(partial(decode.forward, token_id_t, ctx)), 5, 5) / layers
        table[bucket] = min(tries, key=times.__getitem__)
        lines.append(f"{rows:3} rows {op:8} {times[old]:6.1f} -> {times[table[bucket]]:6.1f} us/layer {table[bucket]}")
        report.say(lines[-1])
        report.results.append({"tune": op, "rows": rows, "us_per_layer": sorted((t, str(c)) for c, t in times.items())})
    return lines


@torch.inference_mode()
def tune_head(report: Report, name: str, rows: int) -> list[str]:
    """The head by itself; it is bf16 in every form."""
    sizes, bucket = MODELS[name][0], bucket_for(rows)
    n, k = product_shapes(sizes)["head"]
    weight = torch.randn(n, k, device=DEVICE, dtype=BF16)
    x_mk, y_mn = torch.randn(rows, k, device=DEVICE, dtype=BF16), torch.empty(rows, n, device=DEVICE)
    stream = ResidualStream.allocate(k, BF16, DEVICE)
    old = SkinnyLinear.make("head", weight, None).configs[bucket]
    tries = list(dict.fromkeys((old, *candidates("half", "head", n, k, bucket))))
    launches = [store(SkinnyLinear("head", weight, None, {bucket: c}), x_mk, y_mn, stream) for c in tries]
    compile_together(launches)
    times = {c: 1e3 * time_ms(capture(launch.run), 5, 3) for c, launch in zip(tries, launches, strict=True)}
    best = min(tries, key=times.__getitem__)
    report.say(f"{rows:3} rows head     {times[old]:6.1f} -> {times[best]:6.1f} us {best}")
    report.results.append({"tune": "head", "rows": rows, "us": sorted((t, str(c)) for c, t in times.items())})
    return [f"{rows:3} rows head     {times[old]:6.1f} -> {times[best]:6.1f} us {best}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("form", choices=TABLES)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--rows", default="1,8,32,64,128")
    parser.add_argument("--ops", default="down,gate_up,o,qkv")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report, lines, ops = Report(), [], options.ops.split(",")
    for rows in map(int, options.rows.split(",")):
        if "head" in ops:
            lines += tune_head(report, options.model, rows)
            torch.cuda.empty_cache()
        lines += tune_chain(report, options.form, options.model, rows, [op for op in ops if op != "head"])
        torch.cuda.empty_cache()
        report.save(options.out)
    print(options.form, options.model, *lines, sep="\n")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
