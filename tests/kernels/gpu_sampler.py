"""Checks the sampling kernels on a GPU and times them: `python tests/kernels/gpu_sampler.py [--out out.json]`.

Numerics: tokens against the reference on the same logits (awkward rows, rows of every kind, a list that overflows), the
kept set against an independent sort in float64, the same token in any batch and in a graph, chi-square of draws. Times:
medians of CUDA graphs over logits that together exceed the L2 cache. Exits 1 when a number is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from gpu_report import capture, time_ms
from torch import Tensor

from octavo.kernels.reference import sample as reference
from octavo.kernels.reference.sample import SlotParameters
from octavo.kernels.triton import sample as kernel
from octavo.kernels.triton.launch import compile_together
from octavo.kernels.triton.sample import Choice, Launch, Rows, Scratch, launches

DEVICE = torch.device("cuda")
VOCAB = 128_256
SIZES = (1, 8, 64, 256)
SHAPES = [(1, VOCAB), (9, 151_936), (64, VOCAB), (256, 32_003), (200, 1000)]
TARGET_US = {(1, "top-k/p"): 40, (64, "top-k/p"): 120, (256, "top-k/p"): 430}
ROTATED_BYTES = 192 << 20
CHI_SQUARE_LIMIT = 3.3
NEVER_LIMIT = 2**31 - 1
MAX_MISMATCHES = 0.003
"""Of tokens: the device's exponential differs from torch's in the last bit, which moves the edge of a nucleus or the
end of a race now and then."""


def slots_of(count: int, seed: int = 0, *, wide: bool = False) -> SlotParameters:
    """Slots of seven kinds in turn: greedy, plain, top-k, top-p, both, min-p, all."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (count,), generator=generator)]

    kind = torch.arange(count) % 7
    random = kind != 0
    k = pick([1, 2, 50, 1000, VOCAB - 1, VOCAB] if wide else [1, 2, 5, 50, 200]).long()
    p = pick([1e-9, 0.1, 0.5, 0.9, 0.99, 1.0])
    parts = SlotParameters(
        divisor_s=torch.where(random, pick([0.3, 0.8, 1.0, 3.0]), 1.0).float(),
        random_s=random,
        k_s=torch.where((kind == 2) | (kind == 4) | (kind == 6), k, NEVER_LIMIT),
        p_s=torch.where((kind == 3) | (kind == 4) | (kind == 6), p, 1.0),
        min_p_log_s=torch.where(kind >= 5, pick([1e-12, 0.01, 0.3, 1.0]).log(), -math.inf).float(),
        seed_s=torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
        index_s=torch.randint(0, 9, (count,), generator=generator),
    )
    return SlotParameters(*(part.to(DEVICE) for part in parts))


class Run:
    """One batch with everything it writes to."""

    def __init__(self, logits: Tensor, slots: SlotParameters, slot_r: Tensor, position_r: Tensor) -> None:
        num_rows, vocab_size = logits.shape
        self.logits, self.slots = logits, slots
        self.last = torch.zeros(slots.k_s.shape[0], dtype=torch.int32, device=DEVICE)
        self.output = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
        self.rows = Rows(slot_r, position_r, self.last, self.output)
        self.scratch = Scratch.allocate(num_rows, vocab_size, DEVICE)

    def __call__(self, choice: Choice = Choice.LIMITED) -> Tensor:
        return kernel.sample(self.logits, self.rows, self.slots, self.scratch, choice, pdl=True).clone()

    def reference(self) -> Tensor:
        return reference.sample(self.logits, self.rows.slot_r, self.rows.position_r, self.slots)


def batch(logits: Tensor, slots: SlotParameters, seed: int = 0) -> Run:
    """Rows in slots of random order, at random positions."""
    generator = torch.Generator().manual_seed(seed)
    slot_r = torch.randperm(slots.k_s.shape[0], generator=generator)[: logits.shape[0]].int().to(DEVICE)
    position_r = torch.randint(1, 5000, (logits.shape[0],), generator=generator, dtype=torch.int32).to(DEVICE)
    return Run(logits, slots, slot_r, position_r)


def normal(num_rows: int, vocab_size: int, scale: float, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(num_rows, vocab_size, device=DEVICE, generator=generator) * scale


def awkward(logits: Tensor) -> Tensor:
    """Rows in turn: as given, rounded, mostly -inf, some NaN, some +inf, constant, all -inf, all NaN."""
    few = torch.rand_like(logits) < 3 / logits.shape[1]
    kinds = [
        logits,
        logits.round(),
        logits.masked_fill(torch.rand_like(logits) < 0.99, -math.inf),
        torch.where(few, math.nan, logits),
        torch.where(few, math.inf, logits),
        torch.full_like(logits, -0.0),
        torch.full_like(logits, -math.inf),
        torch.full_like(logits, math.nan),
    ]
    return torch.stack([kinds[row % len(kinds)][row] for row in range(logits.shape[0])])


def mismatches(run: Run) -> float:
    """Share of rows whose token is not the reference's; 1 when the other targets disagree."""
    tokens = run()
    same_targets = run.output.equal(tokens.int()) and run.last[run.rows.slot_r.long()].equal(tokens.int())
    return float((tokens != run.reference()).float().mean()) if same_targets else 1.0


def outside(run: Run) -> float:
    """Share of drawn tokens outside of the kept set, by a float64 sort that allows the edge 1e-6 of mass."""
    tokens, slots = run(), run.slots
    slot_r = run.rows.slot_r.long()
    x = run.logits.double() / slots.divisor_s[slot_r].double().unsqueeze(1)
    value, order = x.sort(1, descending=True)
    place = torch.arange(x.shape[1], device=DEVICE)
    k = slots.k_s[slot_r].unsqueeze(1)
    share = value.softmax(1).masked_fill(place >= k, 0)
    share /= share.sum(1, keepdim=True)
    kept = (share.cumsum(1) - share < slots.p_s[slot_r].unsqueeze(1) + 1e-6) & (place < k)
    least = value.gather(1, kept.sum(1, keepdim=True) - 1)
    least = least.maximum(value[:, :1] + slots.min_p_log_s[slot_r].double().unsqueeze(1) - 1e-5)
    own = x.gather(1, tokens.unsqueeze(1))
    wrong = torch.where(slots.random_s[slot_r], (own < least - 1e-6).squeeze(1), tokens != order[:, 0])
    return float(wrong.float().mean())


def overflow() -> float:
    """All but equal logits: too many candidates for the list, whatever the depth."""
    run = batch(normal(60, VOCAB, 0.0005, 5), slots_of(70, 3, wide=True), 6)
    wrong = mismatches(run)
    assert int(run.scratch.listed_rx[:, 1].max()) > kernel.GATHERED, "the case overflows nothing"
    return wrong


def batch_dependence() -> float:
    """Share of rows that give another token alone, in eights, or by fewer launches."""
    slots = slots_of(96)
    run = batch(normal(90, VOCAB, 2.5, 7), slots, 8)
    together = run()
    wrong = 0
    for first, size in [(0, 1), (17, 1), (30, 8), (50, 40)]:
        part = slice(first, first + size)
        some = Run(run.logits[part], slots, run.rows.slot_r[part], run.rows.position_r[part])
        wrong += int((some() != together[part]).sum())
    plain = (slots.k_s[run.rows.slot_r.long()] == NEVER_LIMIT) & (slots.p_s[run.rows.slot_r.long()] == 1.0)
    plain &= slots.min_p_log_s[run.rows.slot_r.long()] == -math.inf
    some = Run(run.logits[plain], slots, run.rows.slot_r[plain], run.rows.position_r[plain])
    return (wrong + int((some(Choice.PLAIN) != together[plain]).sum())) / 90


def graph_difference() -> float:
    """Share of tokens that differ between a graph's replays over other logits and launches as usual."""
    run = batch(normal(64, VOCAB, 2.5, 9), slots_of(70), 10)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.sample(run.logits, run.rows, run.slots, run.scratch, Choice.LIMITED, pdl=True)
    wrong = 0
    for seed in range(20):
        run.logits.copy_(normal(64, VOCAB, 2.5, seed))
        run.rows.position_r.add_(1)
        graph.replay()
        replayed = run.scratch.token_r[:64].clone()
        wrong += int((run() != replayed).sum())
    return wrong / (20 * 64)


def chi_square(params: dict[str, float], kept: Callable[[Tensor], Tensor]) -> float:
    """Normal deviations of the statistic over 204,800 draws from 8,192 tokens; infinite when an unkept one is drawn."""
    num_rows, vocab_size = 2048, 8192
    logits = normal(1, vocab_size, 3.0, 11).expand(num_rows, -1)
    slots = SlotParameters(
        *(torch.tensor([value], dtype=dtype, device=DEVICE) for value, dtype in (
            (params.get("temperature", 1.0), torch.float32), (True, torch.bool),
            (params.get("k", NEVER_LIMIT), torch.int64), (params.get("p", 1.0), torch.float64),
            (-math.inf, torch.float32), (42, torch.int64), (0, torch.int64),
        ))
    )  # fmt: skip
    slot_r = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    run = Run(logits, slots, slot_r, torch.arange(num_rows, dtype=torch.int32, device=DEVICE))
    counts = torch.zeros(vocab_size, device=DEVICE)
    for _ in range(100):
        counts += run().bincount(minlength=vocab_size)
        run.rows.position_r.add_(num_rows)
    share = kept((logits[0].double() / params.get("temperature", 1.0)).softmax(0))
    expected = share / share.sum() * counts.sum()
    if bool((counts[expected == 0] > 0).any()):
        return math.inf
    likely = expected >= 5
    statistic = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    freedom = int(likely.sum()) - 1
    return abs(statistic - freedom) / (2 * freedom) ** 0.5


def top(share: Tensor, k: int, p: float) -> Tensor:
    """The share of tokens that top-k, then top-p keep."""
    value, order = share.sort(descending=True)
    value[k:] = 0
    value = value / value.sum()
    value[(value.cumsum(0) - value) >= p] = 0
    return torch.zeros_like(share).scatter(0, order, value)


def compile_shapes(shapes: list[tuple[int, int]]) -> None:
    """Compile what batches of (rows, tokens) need, all together."""
    slots = slots_of(8)
    ints = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rows = Rows(ints, ints, ints, ints)
    compile_together(
        launch
        for num_rows, vocab_size in shapes
        for choice in Choice
        for launch in launches(
            torch.empty(num_rows, vocab_size, device=DEVICE), rows, slots, Scratch.allocate(1, 1, DEVICE), choice
        )
    )


def check_all() -> dict[str, tuple[float, float]]:
    """(number, limit) of each check."""
    found: dict[str, tuple[float, float]] = {}
    compile_shapes([*SHAPES, (56, 50_257), (8, VOCAB), (2048, 8192)])
    for num_rows, vocab_size in SHAPES:
        run = batch(normal(num_rows, vocab_size, 2.5, num_rows), slots_of(300), num_rows)
        found[f"tokens {num_rows} x {vocab_size}"] = mismatches(run), MAX_MISMATCHES
        found[f"outside {num_rows} x {vocab_size}"] = outside(run), 0.0
    found["awkward rows"] = mismatches(batch(awkward(normal(56, 50_257, 3.0, 3)), slots_of(60), 4)), MAX_MISMATCHES
    found["too many candidates"] = overflow(), 0.02
    found["other batches"] = batch_dependence(), 0.0
    found["graph replays"] = graph_difference(), 0.0
    found["chi-square, plain"] = chi_square({}, lambda share: share), CHI_SQUARE_LIMIT
    found["chi-square, k 20, p 0.95"] = chi_square({"k": 20, "p": 0.95}, lambda s: top(s, 20, 0.95)), CHI_SQUARE_LIMIT
    wide = {"temperature": 1.5, "p": 0.9}
    found["chi-square, T 1.5, p 0.9"] = chi_square(wide, lambda s: top(s, 8192, 0.9)), CHI_SQUARE_LIMIT
    return found


WORKLOADS: dict[str, tuple[Choice, float, int, float]] = {
    "greedy": (Choice.GREEDY, 0.0, NEVER_LIMIT, 1.0),
    "T 1": (Choice.PLAIN, 1.0, NEVER_LIMIT, 1.0),
    "top-k/p": (Choice.LIMITED, 0.8, 50, 0.9),
}
"""(choice, temperature, top-k of every second row, top-p)"""


def workload(name: str, num_rows: int) -> list[list[Launch]]:
    """The launches of several batches over logits of their own."""
    choice, temperature, k, p = WORKLOADS[name]
    row = torch.arange(num_rows, device=DEVICE)
    slots = SlotParameters(
        divisor_s=torch.full((num_rows,), temperature or 1.0, device=DEVICE),
        random_s=torch.full((num_rows,), temperature > 0, device=DEVICE),
        k_s=torch.where(row % 2 == 0, k, NEVER_LIMIT),
        p_s=torch.full((num_rows,), p, dtype=torch.float64, device=DEVICE),
        min_p_log_s=torch.full((num_rows,), -math.inf, device=DEVICE),
        seed_s=row,
        index_s=torch.zeros_like(row),
    )
    copies = max(2, min(64, ROTATED_BYTES // (num_rows * VOCAB * 4)))
    runs = [Run(normal(num_rows, VOCAB, 2.5, seed), slots, row.int(), row.int()) for seed in range(copies)]
    return [launches(run.logits, run.rows, slots, run.scratch, choice) for run in runs]


def replay_us(batches: list[list[Launch]], repeats: int = 15) -> float:
    """Median microseconds of one batch, all captured back to back in one graph."""
    graph = capture(lambda: [launch.run() for launch in chain.from_iterable(batches)])
    return 1e3 * time_ms(graph, repeats, inner=1) / len(batches)


def time_all() -> list[dict[str, object]]:
    """One row a workload and batch: microseconds of all kernels, and of each one alone (back to back with itself)."""
    timings: list[dict[str, object]] = []
    for num_rows in SIZES:
        for name in WORKLOADS:
            batches = workload(name, num_rows)
            us = replay_us(batches)
            alone = {}
            for step in zip(*batches, strict=True):
                for launch in chain.from_iterable(batches):  # each kernel finds what the others leave it
                    launch.run()
                alone[step[0].kernel.__name__.removesuffix("_kernel")] = round(replay_us([[one] for one in step]), 1)
            target = TARGET_US.get((num_rows, name))
            timings.append({"rows": num_rows, "workload": name, "us": round(us, 1), "target": target, "alone": alone})
            torch.cuda.empty_cache()
    return timings


def tune(sizes: tuple[int, ...] = (64, 256)) -> None:
    """Each kernel alone, by tokens of a chunk and warps; back to back with itself."""
    for num_rows, chunk in itertools.product(sizes, (1024, 2048, 4096)):
        kernel.CHUNK_SIZES = ((1 << 30, chunk),)
        batches = workload("top-k/p", num_rows)
        by_warps = {
            warps: [[replace(one, num_warps=warps) for one in batch_] for batch_ in batches] for warps in (1, 2, 4, 8)
        }
        compile_together(launch for each in by_warps.values() for launch in each[0])
        for step in range(len(batches[0])):
            line = {}
            for warps, changed in by_warps.items():
                for launch in chain.from_iterable(batches):
                    launch.run()
                line[warps] = round(replay_us([[batch_[step]] for batch_ in changed], 7), 1)
            name = batches[0][step].kernel.__name__.removesuffix("_kernel")
            print(f"{num_rows:5d} rows, chunks of {chunk}, {name:7s} us by warps: {line}", flush=True)
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true", help="other chunks and warps, instead of the checks")
    arguments = parser.parse_args()
    path: Path | None = arguments.out
    if arguments.tune:
        tune()
        return 0
    found = check_all()
    for name, (number, limit) in found.items():
        print(f"{'ok  ' if number <= limit else 'BAD '} {name:28s} {number:.5f} (at most {limit})", flush=True)
    timings = time_all()
    print(f"{'rows':>5s}  {'workload':10s} {'us':>8s} {'target':>7s}  each kernel alone, us")
    for timing in timings:
        print("{rows:5d}  {workload:10s} {us:8.1f} {target!s:>7s}  {alone}".format(**timing))
    if path:
        device = torch.cuda.get_device_name()
        path.write_text(json.dumps({"device": device, "checks": found, "timings": timings}, indent=1))
    return int(any(number > limit for number, limit in found.values()))


if __name__ == "__main__":
    sys.exit(main())
