"""Mixtures of experts on a Hopper GPU, at Qwen3-30B-A3B's shape: numerics, time of the block, time of a decode step.

    PYTHONPATH=python python tests/kernels/gpu_moe.py --out moe.json [--parts numerics,block,step,variants]

Compiles in parallel first. Prints every failure as it is found and a table last; the exit code is 1 if anything failed.
"variants" times other tiles (kernels/triton/moe_table.py). The step takes about 65 GB. `tests/run` does not run it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fused_models import QWEN3_30B_A3B
from fused_steps import relative_error
from gpu_fused import Step, exact_logits, make_step, mixed
from gpu_report import Part, Report, capture, run_parts, time_ms
from torch import Tensor
from torch.nn import functional as F

from octavo.attention.base import make_backend
from octavo.kernels.reference.moe import experts as reference_experts
from octavo.kernels.reference.moe import route
from octavo.kernels.reference.skinny_linear import rms_norm
from octavo.kernels.triton import moe, moe_table
from octavo.kernels.triton.launch import Launch, compile_together
from octavo.kernels.triton.moe_experts import DecodeBuffers, Experts
from octavo.kernels.triton.moe_table import SHARED_BYTES, RowBlocks, Tile, tiles_for
from octavo.kernels.triton.skinny_linear import ResidualStream
from octavo.kernels.triton.skinny_table import MAX_ROWS, bucket_for
from octavo.layers.moe import SparseMLP
from octavo.models.config import NormalConfig, normalize_config
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
SIZES = QWEN3_30B_A3B
NUM_EXPERTS, TOP_K = 128, 8
EPS = 1e-6
READ_BYTES_PER_S, FLOP_PER_S, EIGHT_FLOP_PER_S = 4.57e12, 794e12, 1461e12
DECODE_ROWS = (1, 2, 8, 16, 33, 64, 100, 128)
PROMPT_ROWS = (1, 7, 129, 256, 1000, 8192, 2048)
BLOCK_ROWS = (1, 8, 32, 128, 256, 2048, 8192)
STEP_ROWS = (1, 32, 128, 256)
CONTEXT, BOUND = 190, 256
CHAIN = 6
"""Layers with weights of their own in a timed chain: none finds its weights in the L2 cache."""


def make_experts() -> Experts:
    """One layer, random; products keep their input's size."""

    def matrix(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=BF16, device=DEVICE).normal_(0, shape[-1] ** -0.5)

    hidden, inner = SIZES.hidden, SIZES.inner
    gate_up, down = matrix(NUM_EXPERTS, 2 * inner, hidden), matrix(NUM_EXPERTS, hidden, inner)
    return Experts(2 * matrix(NUM_EXPERTS, hidden), gate_up, down, TOP_K, True)


def run(launches: list[Launch]) -> None:
    for launch in launches:
        launch.run()


@dataclass
class DecodeCase:
    """Rows on a residual stream, as a block's attention leaves them."""

    stream: ResidualStream
    buffers: DecodeBuffers
    gain: Tensor
    rows: int

    @classmethod
    def make(cls, experts: Experts, rows: int) -> DecodeCase:
        stream = ResidualStream.allocate(SIZES.hidden, BF16, DEVICE)
        gain = (0.5 + torch.rand(SIZES.hidden, device=DEVICE)).to(BF16)
        stream.residual_mn[:rows].normal_()
        residual = stream.residual_mn[:rows].float()
        stream.gained_mn[:rows] = residual * gain.float()
        stream.squares_f.view(-1, bucket_for(rows))[0, :rows] = residual.square().sum(1)
        return cls(stream, DecodeBuffers.allocate(experts), gain, rows)

    def launches(self, experts: Experts, partials: int = 1) -> list[Launch]:
        gain = self.gain
        return moe.decode(experts, self.stream, self.buffers, self.rows, partials=partials, gain_n=gain, eps=EPS)


# --- numerics


def check_decode(report: Report, experts: Experts) -> None:
    cases = {rows: DecodeCase.make(experts, rows) for rows in DECODE_ROWS}
    count = compile_together(launch for case in cases.values() for launch in case.launches(experts))
    report.say(f"decode: {count} kernels compiled")
    for rows, case in cases.items():
        before = case.stream.residual_mn[:rows].clone()
        normed = rms_norm(before, case.gain, EPS)
        run(case.launches(experts))
        routing = case.buffers.routing
        chosen = routing.expert_f[: rows * TOP_K].view(rows, TOP_K).long()
        weights = routing.weight_f[: rows * TOP_K].view(rows, TOP_K)
        logits = normed @ experts.router_eh.float().T
        expert_mj, weight_mj = route(logits, TOP_K, True)
        # the kernels round the normed row: where another expert was chosen, its logit must be within that rounding
        gap = (logits.gather(1, expert_mj) - logits.gather(1, chosen)).abs().max().item()
        report.check(f"decode {rows} rows: logit gap of the choice", gap, 5e-2)
        report.check(f"decode {rows} rows: weights", relative_error(weights, weight_mj), 2e-2)
        expected = reference_experts(normed, chosen, weights, experts.gate_up_e2ih, experts.down_ehi)
        after = case.stream.residual_mn[:rows].float()
        report.check(f"decode {rows} rows: output", relative_error(after - before.float(), expected), 1.5e-2)
        report.check(
            f"decode {rows} rows: gained", relative_error(case.stream.gained_mn[:rows], after * case.gain), 4e-3
        )
        partials, bucket = moe.num_partials(experts, rows), bucket_for(rows)
        squares = case.stream.squares_f.view(-1, bucket)[:partials, :rows].sum(0)
        report.check(f"decode {rows} rows: squares", relative_error(squares, after.square().sum(1)), 1e-5)


def check_prompts(report: Report, experts: Experts) -> None:
    made = []
    for rows in PROMPT_ROWS:
        x_mh = torch.randn(rows, SIZES.hidden, device=DEVICE).to(BF16)
        logit_me = F.linear(x_mh, experts.router_eh)
        out_mh = torch.full_like(x_mh, torch.nan)
        made.append((rows, x_mh, logit_me, out_mh, moe.forward(experts, x_mh, logit_me, out_mh)))
    report.say(f"prompts: {compile_together(launch for *_, launches in made for launch in launches)} kernels compiled")
    for rows, x_mh, logit_me, out_mh, launches in made:
        run(launches)
        expected = reference_experts(
            x_mh.float(), *route(logit_me, TOP_K, True), experts.gate_up_e2ih, experts.down_ehi
        )
        report.check(f"prompt {rows} rows: output", relative_error(out_mh, expected), 1e-2)
        first = out_mh.clone()
        run(launches)
        report.check(f"prompt {rows} rows: repeats differ", (first != out_mh).float().sum().item(), 0.5)
    rows, x_mh, logit_me, out_mh, _ = made[-1]
    logit_me[:, 5] += 100  # every row's first choice
    run(moe.forward(experts, x_mh, logit_me, out_mh))
    routed = route(logit_me, TOP_K, True)
    expected = reference_experts(x_mh.float(), *routed, experts.gate_up_e2ih, experts.down_ehi)
    report.check(f"prompt {rows} rows, one expert of all: output", relative_error(out_mh, expected), 1e-2)


def config_of(layers: int) -> NormalConfig:
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": SIZES.vocab,
        "hidden_size": SIZES.hidden,
        "intermediate_size": 6144,
        "moe_intermediate_size": SIZES.inner,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "num_hidden_layers": layers,
        "num_attention_heads": SIZES.heads,
        "num_key_value_heads": SIZES.kv_heads,
        "head_dim": SIZES.head_dim,
        "max_position_embeddings": 8192,
        "rms_norm_eps": EPS,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }
    return normalize_config(raw)


@torch.inference_mode()
def make_model(layers: int) -> Decoder:
    """Random weights that keep their input's size; fused decode kernels."""
    model = build_model(config_of(layers), dtype=BF16, device=DEVICE, decode_kernels="fused")
    assert isinstance(model, Decoder)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0.0, 1.0 if name.startswith("embed") else parameter.shape[-1] ** -0.5)
    model.set_attention_backend(make_backend("triton"))
    return model


def check_model(report: Report) -> None:
    """Two layers: fused and plain steps against fp32 modules with the loop over experts."""
    model = make_model(2)
    exact = build_model(config_of(2), dtype=torch.float32, device=DEVICE, decode_kernels="plain")
    assert isinstance(exact, Decoder)
    exact.set_attention_backend(make_backend("reference"))
    for module in exact.modules():
        if isinstance(module, SparseMLP):
            module.has_kernels = False
    steps = {rows: make_step(model, SIZES, mixed(rows, 700)) for rows in (1, 8, 33, 128)}
    report.say(f"model: {compile_together(k for step in steps.values() for k in step.launches())} kernels compiled")
    for rows, step in steps.items():
        expected = exact_logits(model, exact, step)
        original = [cache.clone() for cache in step.ctx.kv_cache]
        fused = step.logits()
        step.ctx.kv_cache = original
        plain = step.plain(step.logits)
        errors = {"fused": relative_error(fused, expected), "plain": relative_error(plain, expected)}
        best = expected.max(-1).values
        gap = (best - expected.gather(1, fused.argmax(-1, keepdim=True))[:, 0]).max().item()
        report.say(
            f"model, {rows} rows: error to fp32 fused {errors['fused']:.4f}, plain {errors['plain']:.4f}; "
            f"fp32 gap of fused argmax {gap:.3f}"
        )
        report.results.append({"model_rows": rows, **errors, "gap": gap})
        # routing flips where two experts' logits are within rounding: both paths have such rows
        report.check(f"model {rows} rows fused", errors["fused"], 1.5 * errors["plain"] + 2e-2)


@torch.inference_mode()
def check_numerics(report: Report) -> None:
    experts = make_experts()
    check_decode(report, experts)
    check_prompts(report, experts)
    del experts
    torch.cuda.empty_cache()
    check_model(report)
    torch.cuda.empty_cache()


# --- time


@dataclass
class BlockBench:
    """A chain of layers' mixtures, each with weights of its own."""

    layers: list[Experts]
    rows: int

    def runner(self) -> tuple[list[Launch], Callable[[], None]]:
        """(kernels to compile, what to capture)."""
        if self.rows <= MAX_ROWS:
            case = DecodeCase.make(self.layers[0], self.rows)
            partials = [1, *[moe.num_partials(self.layers[0], self.rows)] * (len(self.layers) - 1)]
            pairs = zip(self.layers, partials, strict=True)
            launches = [launch for layer, count in pairs for launch in case.launches(layer, count)]
            return launches, lambda: run(launches)
        x_mh = torch.randn(self.rows, SIZES.hidden, device=DEVICE).to(BF16)
        logit_me, out_mh = F.linear(x_mh, self.layers[0].router_eh), torch.empty_like(x_mh)

        def forward() -> None:
            for layer in self.layers:
                moe.mix(layer, x_mh, F.linear(x_mh, layer.router_eh))

        return moe.forward(self.layers[0], x_mh, logit_me, out_mh), forward

    def time_us(self) -> float:
        """Of one layer."""
        _, forward = self.runner()
        return 1e3 * time_ms(capture(forward), 5, 3) / len(self.layers)

    @property
    def is_eight(self) -> bool:
        return self.layers[0].scales is not None

    def floor_us(self) -> tuple[float, float]:
        """(bytes, operations) of one layer with uniform routing at the card's measured ceilings."""
        touched = NUM_EXPERTS * (1 - (1 - TOP_K / NUM_EXPERTS) ** self.rows)
        size = 3 * SIZES.hidden * SIZES.inner
        num_bytes = (1 if self.is_eight else 2) * touched * size + 2 * NUM_EXPERTS * SIZES.hidden
        speed = EIGHT_FLOP_PER_S if self.is_eight else FLOP_PER_S
        return 1e6 * num_bytes / READ_BYTES_PER_S, 1e6 * 2 * self.rows * TOP_K * size / speed


@torch.inference_mode()
def time_block(report: Report, make: Callable[[], Experts] = make_experts) -> None:
    layers = [make() for _ in range(CHAIN)]
    benches = [BlockBench(layers, rows) for rows in BLOCK_ROWS]
    kernels = [launch for bench in benches for launch in bench.runner()[0]]
    report.say(f"block: {compile_together(kernels)} kernels compiled")
    for bench in benches:
        found, floors = bench.time_us(), bench.floor_us()
        row = {"block_rows": bench.rows, "us": found, "bytes_us": floors[0], "flop_us": floors[1]}
        report.results.append(row | {"share": max(floors) / found})
        report.say(
            f"block {bench.rows:5} rows: {found:8.1f} us; bytes {floors[0]:6.1f} us, operations {floors[1]:6.1f} us: "
            f"{100 * max(floors) / found:.0f}% of the ceiling"
        )


def step_floor_ms(rows: int) -> float:
    """Weights that uniform routing touches, and KV."""
    hidden, dim = SIZES.hidden, SIZES.head_dim
    query, key = SIZES.heads * dim, SIZES.kv_heads * dim
    touched = NUM_EXPERTS * (1 - (1 - TOP_K / NUM_EXPERTS) ** rows)
    layer = (2 * query + 2 * key) * hidden + NUM_EXPERTS * hidden + touched * 3 * hidden * SIZES.inner
    numbers = SIZES.layers * (layer + rows * CONTEXT * 2 * key) + SIZES.vocab * hidden
    return 1e3 * 2 * numbers / READ_BYTES_PER_S


@torch.inference_mode()
def time_step(report: Report) -> None:
    model = make_model(SIZES.layers)
    steps = {rows: make_step(model, SIZES, [CONTEXT] * rows, BOUND) for rows in STEP_ROWS}
    fused: dict[int, Step] = {rows: step for rows, step in steps.items() if rows <= MAX_ROWS}
    report.say(f"step: {compile_together(k for step in fused.values() for k in step.launches())} kernels compiled")
    for rows, step in steps.items():
        found, floor = time_ms(capture(step.logits)), step_floor_ms(rows)
        report.results.append({"step_rows": rows, "ms": found, "floor_ms": floor})
        path = "fused" if rows in fused else "plain"
        report.say(f"step {rows:4} rows ({path}): {found:.3f} ms; floor {floor:.3f} ms: {100 * floor / found:.0f}%")
    del model, steps, fused
    torch.cuda.empty_cache()


# --- variants

SMALL_GATE_UP = [(64, 128, 2, 4), (64, 128, 3, 4), (64, 128, 4, 4), (64, 64, 6, 4), (128, 64, 4, 4), (128, 128, 2, 8)]
SMALL_DOWN = [(64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4), (128, 64, 6, 4), (128, 128, 3, 4), (64, 256, 3, 4)]
LARGE_GATE_UP = [(128, 64, 3, 8), (128, 64, 4, 8), (64, 64, 4, 4), (64, 64, 4, 8), (64, 128, 3, 4), (64, 128, 3, 8)]
LARGE_DOWN = [(128, 64, 4, 8), (128, 64, 3, 8), (256, 64, 3, 8), (128, 64, 4, 4), (128, 128, 3, 8), (64, 128, 3, 4)]
"""(block n, block k, stages, warps) of rows in tiles up to 32, and from 64."""
TILE_ROWS = {8: (16,), 32: (16,), 128: (16, 32), 256: (16, 32, 64), 2048: (64, 128), 8192: (64, 128)}
"""Rows -> places of a tile to try."""
ONE_ROW_GATE_UP = [RowBlocks(*sizes) for sizes in ((2, 2048, 4), (4, 1024, 4), (4, 2048, 8), (8, 512, 4), (8, 1024, 4))]
ONE_ROW_GATE_UP += [RowBlocks(8, 1024, 8), RowBlocks(1, 2048, 4), RowBlocks(16, 256, 4)]
ONE_ROW_DOWN = [
    RowBlocks(*sizes) for sizes in ((2, 256, 4), (4, 128, 4), (4, 256, 4), (4, 256, 8), (8, 128, 4), (8, 256, 8))
]


@contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    """A global of moe_table.py, for a while."""
    before = getattr(moe_table, name)
    setattr(moe_table, name, value)
    try:
        yield
    finally:
        setattr(moe_table, name, before)


def tile_variants(rows: int) -> list[dict[str, Tile]]:
    """Each candidate of one product beside the default of the other (of as many places)."""
    default = tiles_for(rows * TOP_K / NUM_EXPERTS, SIZES.hidden, SIZES.inner, 2)
    found = [default]
    for block_m in TILE_ROWS[rows]:
        swap = block_m < 64
        gate_ups = [Tile(block_m, *sizes, swap) for sizes in (SMALL_GATE_UP if swap else LARGE_GATE_UP)]
        downs = [Tile(block_m, *sizes, swap) for sizes in (SMALL_DOWN if swap else LARGE_DOWN)]
        found += [{"gate_up": tile, "down": downs[1 if swap else 0]} for tile in gate_ups]
        found += [{"gate_up": gate_ups[1], "down": tile} for tile in downs]
    fits = [t for t in found if all(tile.shared_bytes(op) + 2048 <= SHARED_BYTES for op, tile in t.items())]
    return list({str(tiles): tiles for tiles in fits}.values())


@torch.inference_mode()
def time_variants(
    report: Report,
    make: Callable[[], Experts] = make_experts,
    variants: Callable[[int], list[dict[str, Tile]]] = tile_variants,
) -> None:
    layers = [make() for _ in range(CHAIN)]
    choices: list[tuple[int, str, Any, str]] = []
    for rows in TILE_ROWS:
        choices += [(rows, "tiles_for", lambda *_, t=tiles, **__: t, str(tiles)) for tiles in variants(rows)]
    choices += [(1, "GATE_UP_ROWS", blocks, f"gate_up {blocks}") for blocks in ONE_ROW_GATE_UP]
    choices += [(1, "DOWN_ROWS", blocks, f"down {blocks}") for blocks in ONE_ROW_DOWN]
    kernels: list[Launch] = []
    for rows, name, value, _ in choices:
        with replaced(name, value):
            kernels += BlockBench(layers[:1] * 2, rows).runner()[0]
    report.say(f"variants: {compile_together(kernels)} kernels compiled")
    times: dict[int, list[tuple[float, str]]] = {}
    for rows, name, value, label in choices:
        with replaced(name, value):
            try:
                times.setdefault(rows, []).append((BlockBench(layers, rows).time_us(), label))
            except Exception as error:  # a tile that does not fit tells nothing of the others
                report.say(f"{rows} rows, {label}: {error!r:.200}")
    for rows, found in sorted(times.items()):
        first = found[0][0]
        report.results.append({"variants_rows": rows, "us": sorted(found), "first_us": first})
        report.say(f"{rows} rows (first listed: {first:.1f} us):")
        for us, label in sorted(found)[:6]:
            print(f"      {us:8.1f} us  {label}", flush=True)


PARTS: dict[str, list[Part]] = {
    "numerics": [check_numerics],
    "block": [time_block],
    "step": [time_step],
    "variants": [time_variants],
}


def print_table(results: list[dict[str, Any]]) -> None:
    for row in results:
        if "block_rows" in row:
            floors = f"{row['bytes_us']:8.1f} {row['flop_us']:8.1f} {100 * row['share']:5.0f}%"
            print(f"block {row['block_rows']:5} rows {row['us']:9.1f} us   bytes, operations, share {floors}")
        elif "step_rows" in row:
            share = 100 * row["floor_ms"] / row["ms"]
            print(f"step  {row['step_rows']:5} rows {row['ms']:9.3f} ms   floor {row['floor_ms']:8.3f} {share:5.0f}%")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("moe.json"))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--budget", type=float, default=85.0, help="seconds after which no further part is begun")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report()
    run_parts(report, PARTS, args.parts, args.out, budget_s=args.budget, seed=args.seed)
    print_table(report.results)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
