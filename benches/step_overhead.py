"""What the host pays per engine step when every sequence decodes: the control plane alone, and the whole loop turn.

    python benches/step_overhead.py [--rows 256,1024] [--steps 400] [--json FILE]

`Core.step`: commit of one sampled token per sequence, planning of the next step, arrays written into the arena, output
frame built. `full queue`: the same while 4096 more requests wait for a slot. `loop turn`: `EngineLoop.step` with the
fake runner (which draws the tokens with numpy). Frames are taken between steps and not timed: the IO thread encodes
them in an engine process. Medians; exit code 1 when a budget is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from octavo import _core
from octavo.config import make_engine_config
from octavo.engine.build import build_engine

BUDGET_STEP_US = {256: 60.0, 1024: 250.0}
BUDGET_TURN_US = {256: 200.0}
NUM_WAITING = 4096
PROMPT_TOKENS = 100
BLOCK_SIZE = 16
WARMUP = 30


def add_requests(core: _core.Core, num_rows: int, max_tokens: int, min_tokens: int = 0, first_id: int = 0) -> None:
    """Prompts of different lengths, so that block borders are spread over the steps."""
    for request_id in range(first_id, first_id + num_rows):
        length = PROMPT_TOKENS + request_id % BLOCK_SIZE
        core.add(
            _core.encode_add(
                request_id=request_id,
                prompt_token_ids=[(request_id * 31 + i) % 1000 for i in range(length)],
                n=1,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop_token_ids=[2, 3],
                priority=0,
                cache_salt=b"",
                deadline_s=0.0,
                logprobs=-1,
                prompt_logprobs=-1,
                params=b"{}",
            )
        )


def median_us(action: Callable[[], object], rest: Callable[[], object], count: int) -> float:
    """Median time of `action`; `rest` runs after each, untimed."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
        rest()
    return statistics.median(times) * 1e6


class BareLoop:
    """Core and buffers without a runner: every sampled token is 7."""

    def __init__(self, num_rows: int, depth: int, max_tokens: int, policy: str = "fcfs") -> None:
        max_len = PROMPT_TOKENS + BLOCK_SIZE + max_tokens
        self.core = _core.Core(
            _core.CoreConfig(
                block_size=BLOCK_SIZE,
                num_blocks=num_rows * (max_len // BLOCK_SIZE + 2),
                max_num_seqs=num_rows,
                max_num_batched_tokens=8192,
                max_model_len=max_len,
                vocab_size=1000,
                policy=policy,
                enable_prefix_caching=True,
                max_itl_ms=None,
                depth=depth,
                max_logprobs=5,
            )
        )
        layout = self.core.output_layout
        arenas = [np.zeros(self.core.arena_layout.num_ints, np.int32) for _ in range(depth + 1)]
        outputs = [np.zeros(layout.num_ints, np.int32) for _ in range(depth + 1)]
        for output in outputs:
            output[layout.sampled : layout.sampled + num_rows] = 7
            output[layout.count : layout.count + num_rows] = 1
        self.core.register(arenas, outputs)
        add_requests(self.core, num_rows, max_tokens)
        plan = self.core.step(None)
        for _ in range(depth - 1):
            plan = self.core.step(None)
        while plan.num_decode_rows < num_rows:
            plan = self.core.step(0)

    def step(self) -> _core.StepPlan:
        return self.core.step(0)


def bare_step(num_rows: int, depth: int, steps: int) -> float:
    loop = BareLoop(num_rows, depth, steps + WARMUP + 100)
    median_us(loop.step, loop.core.take_frames, WARMUP)
    result = median_us(loop.step, loop.core.take_frames, steps)
    assert loop.step().num_decode_rows == num_rows, "a sequence ended during the measurement"
    return result


def full_queue(num_rows: int, depth: int, steps: int) -> float:
    """The slower of the two policies."""
    results = []
    for policy in ("fcfs", "priority"):
        loop = BareLoop(num_rows, depth, steps + 2 * WARMUP + 100, policy)
        add_requests(loop.core, NUM_WAITING, 1, first_id=num_rows)
        median_us(loop.step, loop.core.take_frames, WARMUP)
        results.append(median_us(loop.step, loop.core.take_frames, steps))
        stats = loop.core.stats()
        assert (stats["num_running"], stats["num_waiting"]) == (num_rows, NUM_WAITING), "the queue moved"
    return max(results)


def loop_turn(num_rows: int, depth: int, steps: int) -> float:
    options = {"max_num_seqs": num_rows, "overlap_depth": depth, "max_model_len": 4096, "max_itl_ms": 0}
    options["max_num_batched_tokens"] = 8192
    config = make_engine_config({"runner": "fake", "device": "cpu", **options})
    loop = build_engine(config, lambda stage, fraction: None)
    add_requests(loop.core, num_rows, 3000, min_tokens=3000)  # the fake tokens may be stop ids
    prefill_steps = num_rows * (PROMPT_TOKENS + BLOCK_SIZE) // 1000 + 10
    median_us(loop.step, loop.core.take_frames, prefill_steps + WARMUP)
    result = median_us(loop.step, loop.core.take_frames, steps)
    assert loop.core.stats()["num_running"] == num_rows, "a sequence ended during the measurement"
    loop.close()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", default="256,1024", help="decode rows, separated by commas")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    results = []
    for num_rows in map(int, args.rows.split(",")):
        for name, measure, budgets in [
            ("Core.step", bare_step, BUDGET_STEP_US),
            ("full queue", full_queue, BUDGET_STEP_US),
            ("loop turn", loop_turn, BUDGET_TURN_US),
        ]:
            for depth in (1, 2):
                time_us = measure(num_rows, depth, args.steps)
                budget_us = budgets.get(num_rows)
                results.append(
                    {"name": name, "rows": num_rows, "depth": depth, "median_us": time_us, "budget_us": budget_us}
                )
                budget = f"  (budget {budget_us:.0f})" if budget_us else ""
                print(f"{name:10} {num_rows:5} rows  depth {depth}  {time_us:8.1f} us{budget}")
    if args.json:
        machine = {"machine": platform.platform(), "python": platform.python_version()}
        args.json.write_text(json.dumps({**machine, "results": results}, indent=2))
    return int(any(r["budget_us"] is not None and r["median_us"] > r["budget_us"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
