"""Which pieces of prompts keep both latencies low? A simulation of a server's steps, for what --max-itl-ms is by
default (rust/core/src/step_cost.rs), how prompts are cut (step_sizes.rs) and when steps are planned (hold.rs). Needs
nothing but Python.

    python benches/chunk_policy.py                        # p50 and p99 of the first token and between tokens, in ms
    python benches/chunk_policy.py --seeds 0,1,2 --share 0.35 --ratio 3

Requests of 1024 tokens arrive as a Poisson process (as serve.py's with the same seed) and decode 128. A step takes as
long as measured on one H200 with Llama-3.1-8B in bf16; two are in flight. "ideal" is one server that works off the same
prompts one after another, 22.1 or 24.3 ms each, and does nothing else: no policy is below. "early" plans a step when
the one before it begins, as the engine did before; "late" a millisecond before it is due. Sizes: what steps with
prompts are padded to, "coarse" as they were before. The server's own time (1.5 ms) is added. "0.35 3 fine late" is how
the engine does it: with seeds 1 and 2, those of h200.py at 10 and 20 requests a second, within 10% of what was seen.
"""

from __future__ import annotations

import argparse
import itertools
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

NUM_IN, NUM_OUT, LARGEST = 1024, 127, 8192
RATES = {10: 200, 20: 300}
"""Requests a second -> requests."""
DECODE_MS = (
    *((1, 3.98), (8, 4.37), (16, 4.95), (24, 5.25), (32, 5.35), (33, 6.15), (48, 6.45)),
    *((64, 7.05), (128, 10.0), (256, 15.8)),
)
"""Steps of so many rows with a thousand tokens of context; in between a line."""
LEAST_MS, FIXED_MS, TOKEN_MS, ROW_MS = 5.5, 2.55, 0.0203, 0.085
"""A step with prompts: at least; by its tokens, padding included; by its decode rows."""
IDEAL_MS = (22.1, 24.3)
SERVER_MS, MARGIN_MS, MARGIN_PART, MIN_CHUNK, MAX_MS, MAX_RATIO = 1.5, 1.0, 4, 32, 100.0, 4.0
SIZES = {
    "coarse": (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048),
    "fine": (*range(64, 385, 64), 512, 576, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1792, 2048),
}


@dataclass(frozen=True, slots=True)
class Policy:
    share: float
    """Of the waiting work, a step takes so much, …"""
    ratio: float
    """… but lasts at least so many times its fixed costs."""
    sizes: tuple[int, ...]
    fills_sizes: bool
    is_late: bool


@dataclass(slots=True)
class Step:
    num_tokens: int
    decodes: list[list[float]]
    firsts: list[tuple[float, list[float]]]
    """(arrival, the new sequence) of prompts that end here."""


def decode_ms(num_rows: int) -> float:
    pairs = itertools.pairwise(DECODE_MS)
    (a, low), (b, high) = next((pair for pair in pairs if num_rows <= pair[1][0]), (DECODE_MS[-2], DECODE_MS[-1]))
    return low + (high - low) * (max(num_rows, a) - a) / (b - a)


def padded(sizes: Sequence[int], num_tokens: int) -> int:
    place = bisect_left(sizes, num_tokens)
    return sizes[place] if place < len(sizes) else num_tokens


def step_ms(step: Step, sizes: Sequence[int]) -> float:
    rows = len(step.decodes)
    if step.num_tokens == 0:
        return decode_ms(rows)
    return max(LEAST_MS, FIXED_MS + TOKEN_MS * padded(sizes, step.num_tokens + rows)) + ROW_MS * rows


def piece(pending: int, rows: int, policy: Policy) -> int:
    """Prompt tokens of a step, as `StepCost::max_prompt_tokens` and `StepSizes::piece` have it."""
    if rows == 0:
        return LARGEST
    fixed = decode_ms(rows)  # the line through measured steps has nothing beside it
    most_ms = max(MAX_RATIO * fixed, MAX_MS)
    limit = min(max(fixed + policy.share * pending * TOKEN_MS, policy.ratio * fixed), most_ms)
    most = max(MIN_CHUNK, int((limit - fixed) / TOKEN_MS) // MIN_CHUNK * MIN_CHUNK)
    if pending <= most or not policy.fills_sizes:
        return most
    equal = padded(policy.sizes, -(-pending // -(-pending // most)) + rows)
    if equal <= most + rows:
        return equal - rows
    fitting = [size - rows for size in policy.sizes if MIN_CHUNK <= size - rows <= most]
    return fitting[-1] if fitting else most


class Server:
    """Two steps in flight."""

    def __init__(self, arrivals: list[float], policy: Policy) -> None:
        self.policy = policy
        self.coming = list(reversed(arrivals))
        self.waiting: list[list[float]] = []  # [arrival, prompt tokens left]
        self.running: list[list[float]] = []  # [output tokens left, time of the last one]
        self.firsts: list[float] = []
        self.gaps: list[float] = []

    def plan(self, now: float) -> Step | None:
        while self.coming and self.coming[-1] <= now:
            self.waiting.append([self.coming.pop(), NUM_IN])
        if not self.waiting and not self.running:
            return None
        rows = list(self.running)
        left = budget = piece(int(sum(left for _, left in self.waiting)), len(rows), self.policy)
        for request in self.waiting:
            taken = min(request[1], left)
            request[1] -= taken
            left -= int(taken)
        for sequence in rows:
            sequence[0] -= 1
        firsts = [(arrival, [float(NUM_OUT), 0.0]) for arrival, tokens in self.waiting if not tokens]
        self.waiting = [request for request in self.waiting if request[1]]
        self.running = [sequence for sequence in rows if sequence[0]] + [new for _, new in firsts]
        return Step(budget - left, rows, firsts)

    def run(self) -> None:
        now, step = 0.0, None
        while step or self.coming or self.running:
            if step is None:
                now = max(now, self.coming[-1]) if self.coming and not self.running else now
                step = self.plan(now)
                assert step is not None, "somebody has come"
            time_ms = step_ms(step, self.policy.sizes)
            margin = max(MARGIN_MS, time_ms / MARGIN_PART)
            following = self.plan(max(now, now + time_ms - margin) if self.policy.is_late else now)
            now += time_ms
            for sequence in step.decodes:
                self.gaps.append(now - sequence[1])
                sequence[1] = now
            for arrival, sequence in step.firsts:
                self.firsts.append(now - arrival + SERVER_MS)
                sequence[1] = now
            step = following


def arrivals(rate: int, seed: int) -> list[float]:
    """Milliseconds; as `arrival_times` of serve.py."""
    rng = random.Random(seed + 1)
    gaps = [1e3 * rng.expovariate(rate) for _ in range(RATES[rate])]
    return [0.0, *itertools.accumulate(gaps[:-1])]


def ideal(times: list[float], prompt_ms: float) -> list[float]:
    free, waits = 0.0, []
    for time_ms in times:
        free = max(free, time_ms) + prompt_ms
        waits.append(free - time_ms)
    return waits


def at_percent(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def mean_percentiles(runs: list[list[float]]) -> str:
    return "".join(f"{sum(at_percent(run, p) for run in runs) / len(runs):>8.1f}" for p in (50, 99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3,4,5,6,7,8", help="of arrivals; figures are means (%(default)s)")
    parser.add_argument("--share", default="0.25,0.35,0.5")
    parser.add_argument("--ratio", default="2,3,4")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    print(f"{'':<28}" + "".join(f"{f'{rate}/s first':>16}{'between':>16}" for rate in RATES))
    for prompt_ms in IDEAL_MS:
        waits = [mean_percentiles([ideal(arrivals(rate, seed), prompt_ms) for seed in seeds]) for rate in RATES]
        print(f"{f'ideal, {prompt_ms} ms a prompt':<28}" + "".join(f"{wait}{'':16}" for wait in waits))
    numbers = [[float(word) for word in text.split(",")] for text in (args.share, args.ratio)]
    ways = [("coarse", False, False), ("fine", True, False), ("fine", True, True)]
    for (share, ratio), (sizes, fills, late) in itertools.product(itertools.product(*numbers), ways):
        line = f"{f'{share} {ratio:g} {sizes} ' + ('late' if late else 'early'):<28}"
        for rate in RATES:
            servers = [Server(arrivals(rate, seed), Policy(share, ratio, SIZES[sizes], fills, late)) for seed in seeds]
            for server in servers:
                server.run()
            line += mean_percentiles([server.firsts for server in servers])
            line += mean_percentiles([server.gaps for server in servers])
        print(line)


if __name__ == "__main__":
    main()
