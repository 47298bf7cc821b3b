"""Which chunks of prompts keep both latencies low? A simulation of a server's steps, for what --max-itl-ms is by
default (rust/core/src/step_cost.rs). Needs nothing but Python.

    python benches/chunk_policy.py

Requests of 1024 tokens arrive as a Poisson process and decode 128. A step takes as long as measured on one H200 with
Llama-3.1-8B in bf16. For every pair (share of the waiting work, least length in decode steps): p50 and p99 of the time
to the first token and between tokens, in ms, at 10 and at 20 requests a second, without the server's own time.
"""

from __future__ import annotations

import itertools
import random

NUM_IN, NUM_OUT, NUM_REQUESTS = 1024, 127, 2000
DECODE_MS, DECODE_ROW_MS = 4.35, 0.045
"""A step of one decode row, and a row more (its KV included)."""
LEAST_MS, FIXED_MS, TOKEN_MS = 5.5, 3.2, 0.0207
"""A step with prompts: at least, and by its tokens."""
MAX_MS, MAX_RATIO, QUANTUM = 100.0, 4.0, 32


def step_ms(num_prompt_tokens: int, num_decodes: int) -> float:
    if num_prompt_tokens == 0:
        return DECODE_MS + DECODE_ROW_MS * num_decodes
    tokens = num_prompt_tokens + num_decodes
    return max(LEAST_MS, FIXED_MS + TOKEN_MS * tokens) + 0.033 * num_decodes


def chunk(pending: int, num_decodes: int, share: float, ratio: float) -> int:
    """Prompt tokens of a step, as `StepCost::max_prompt_tokens` has it."""
    if num_decodes == 0:
        return 8192
    fixed = step_ms(0, num_decodes) + 0.6
    limit = min(max(fixed + share * pending * TOKEN_MS, ratio * fixed), max(MAX_RATIO * fixed, MAX_MS))
    return max(QUANTUM, int((limit - fixed) / TOKEN_MS) // QUANTUM * QUANTUM)


def simulate(rate: float, share: float, ratio: float) -> tuple[list[float], list[float]]:
    """(times to the first token, times between tokens), first come first served."""
    rng = random.Random(1)
    arrivals = list(itertools.accumulate((1e3 * rng.expovariate(rate) for _ in range(NUM_REQUESTS - 1)), initial=0.0))
    now = 0.0
    waiting: list[list[float]] = []  # [arrival, prompt tokens left]
    running: list[list[float]] = []  # [output tokens left, time of the last one]
    firsts: list[float] = []
    gaps: list[float] = []
    at = 0
    while at < len(arrivals) or waiting or running:
        if not waiting and not running:
            now = max(now, arrivals[at])
        while at < len(arrivals) and arrivals[at] <= now:
            waiting.append([arrivals[at], NUM_IN])
            at += 1
        left = budget = chunk(int(sum(left for _, left in waiting)), len(running), share, ratio)
        for request in waiting:
            taken = min(request[1], left)
            request[1] -= taken
            left -= int(taken)
        now += step_ms(budget - left, len(running))
        for sequence in running:
            gaps.append(now - sequence[1])
            sequence[0], sequence[1] = sequence[0] - 1, now
        running = [sequence for sequence in running if sequence[0]]
        firsts += [now - arrival for arrival, tokens in waiting if not tokens]
        running += [[NUM_OUT, now] for _, tokens in waiting if not tokens]
        waiting = [request for request in waiting if request[1]]
    return firsts, gaps


def at_percent(values: list[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


def main() -> None:
    print(f"{'share':>6}{'ratio':>6}" + "".join(f"{f'{rate}/s first':>16}{'between':>16}" for rate in (10, 20)))
    for share, ratio in itertools.product((0.25, 0.35, 0.5, 1.0), (2.0, 3.0, 4.0)):
        line = f"{share:>6}{ratio:>6}"
        for rate in (10, 20):
            for values in simulate(rate, share, ratio):
                line += f"{at_percent(values, 50):>8.1f}{at_percent(values, 99):>8.1f}"
        print(line)


if __name__ == "__main__":
    main()
