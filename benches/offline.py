"""Offline speed of `LLM`: decode time per step, throughput, prefill, shared prefixes. One process, one model, JSON out.

    python benches/offline.py --shape llama-3.1-8b decode throughput prefill
    python benches/offline.py --model FOLDER --batch 1,8 --max-model-len 4096 decode

`--shape` makes random weights of a known model's shape from its config alone (nothing is downloaded), with a tokenizer
of the same size, so that detokenization is done and counted. Every engine option is a flag here too. Prompts are fresh
random ids in every run: a repetition never finds its own prompts in the prefix cache. Greedy and past EOS unless said
otherwise. What is measured is the wall time of `LLM.generate`, from ids to finished outputs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from grammar import PEOPLE
from kernel_times import recorded
from kernel_times import summary as kernel_summary
from shapes import SHAPES, write_shape
from step_trace import Trace, summary, write

from octavo.cli import Command, Parser, command_parser, read_values
from octavo.config import ENGINE_SECTIONS, changed, make_engine_config
from octavo.errors import OctavoError
from octavo.sampling_params import SamplingParams

LOW_ID, HIGH_ID = 100, 10000
SLOW_CHORE_S = 0.05


class Bench:
    """An engine and the workloads that run on it; every method returns one JSON value."""

    def __init__(self, llm: Any, options: argparse.Namespace) -> None:
        self.llm = llm
        self.options = options
        self._random = random.Random(1)

    def prompts(self, number: int, length: int) -> list[list[int]]:
        top = min(HIGH_ID, self.llm.facts.vocab_size - 1)
        return [[self._random.randint(min(LOW_ID, top), top) for _ in range(length)] for _ in range(number)]

    def seconds(self, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams]) -> float:
        """Wall time of one `generate`; the outputs' lengths are checked, so that nothing was skipped."""
        run = self._profiled if self.options.kernels else self._generate
        start = time.perf_counter()
        outputs = run(prompts, params)
        elapsed = time.perf_counter() - start
        wanted = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        for output, one in zip(outputs, wanted, strict=True):
            assert len(output.outputs[0].token_ids) == one.max_tokens
        return elapsed

    def _generate(self, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Any]:
        return self.llm.generate(prompts, params, use_tqdm=False)

    def _profiled(self, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Any]:
        outputs, kernels = recorded(partial(self._generate, prompts, params))
        show(f"-- kernels of {len(prompts)} prompts\n{kernel_summary(kernels)}")
        return outputs

    def run_fresh(self, number: int, num_in: int, params: SamplingParams) -> float:
        """Seconds of `number` new prompts."""
        return self.seconds(self.prompts(number, num_in), params)

    def decode(self) -> dict[str, dict[str, float]]:
        """Milliseconds a decode step by batch size: (T(out n) - T(out 1)) / (n - 1), best of `--repeat`."""
        num_in, num_out = self.options.num_in or 128, self.options.num_out or 128
        table = {}
        for batch in self.options.batch:
            long, short = greedy(num_out), greedy(1)
            self.run_fresh(batch, num_in, greedy(min(8, num_out)))
            t_long = self.best(partial(self.run_fresh, batch, num_in, long))
            t_short = self.best(partial(self.run_fresh, batch, num_in, short))
            step_ms = 1e3 * (t_long - t_short) / (num_out - 1)
            table[str(batch)] = {"step_ms": step_ms, "tokens_per_s": 1e3 * batch / step_ms, "first_token_s": t_short}
            show(f"decode batch {batch}: {step_ms:.3f} ms a step, {1e3 * batch / step_ms:.0f} tokens/s")
        return table

    def throughput(self) -> dict[str, float]:
        """`--num-prompts` x (`--num-in` -> `--num-out`), default 512 x (1024 -> 256)."""
        number = self.options.num_prompts or 512
        num_in, num_out = self.options.num_in or 1024, self.options.num_out or 256
        elapsed = self.best(partial(self.run_fresh, number, num_in, greedy(num_out)))
        return self.rates("throughput", elapsed, number * num_in, number * num_out)

    def random_lengths(self) -> dict[str, float]:
        """Input and output lengths uniform in 100..1024, 256 sequences, temperature 0.6; always the same prompts."""
        r = random.Random(0)
        number = self.options.num_prompts or 256
        prompts = [[r.randint(0, 10000) for _ in range(r.randint(100, 1024))] for _ in range(number)]
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=r.randint(100, 1024)) for _ in prompts]
        num_in, num_out = sum(map(len, prompts)), sum(p.max_tokens or 0 for p in params)

        def once() -> float:
            self.llm.reset_prefix_cache()
            return self.seconds(prompts, params)

        return self.rates("random lengths", self.best(once), num_in, num_out)

    def prefill(self) -> dict[str, dict[str, float]]:
        """One output token of 64 prompts and of one prompt, `--num-in` (2048) tokens each."""
        num_in = self.options.num_in or 2048
        table = {}
        for number in (self.options.num_prompts or 64, 1):
            elapsed = self.best(partial(self.run_fresh, number, num_in, greedy(1)))
            table[str(number)] = self.rates(f"prefill of {number}", elapsed, number * num_in, number)
        return table

    def shared_prefix(self) -> dict[str, float]:
        """256 x (2048 shared + 64 own tokens -> 64): cold, then warm with other own tokens."""
        number, num_out = self.options.num_prompts or 256, self.options.num_out or 64
        prefix = self.prompts(1, self.options.num_in or 2048)[0]
        self.llm.reset_prefix_cache()
        cold = self.seconds([prefix + own for own in self.prompts(number, 64)], greedy(num_out))
        warm = self.seconds([prefix + own for own in self.prompts(number, 64)], greedy(num_out))
        show(f"shared prefix: {cold:.3f} s cold, {warm:.3f} s warm")
        return {"cold_s": cold, "warm_s": warm}

    def sampled(self) -> dict[str, float]:
        """128 x (128 -> 128) at temperature 1."""
        number = self.options.num_prompts or 128
        num_in, num_out = self.options.num_in or 128, self.options.num_out or 128
        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=num_out)
        elapsed = self.best(partial(self.run_fresh, number, num_in, params))
        return self.rates("sampled", elapsed, number * num_in, number * num_out)

    def constrained(self) -> dict[str, float]:
        """`sampled`, every row held to a JSON schema (an array of records that does not end), and its share of the
        speed without one."""
        number = self.options.num_prompts or 128
        num_in, num_out = self.options.num_in or 128, self.options.num_out or 128
        plain = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=num_out)
        held = replace(plain, structured_outputs={"json": PEOPLE})
        self.run_fresh(number, num_in, held)
        plain_s = self.best(partial(self.run_fresh, number, num_in, plain))
        held_s = self.best(partial(self.run_fresh, number, num_in, held))
        show(f"constrained: {100 * plain_s / held_s:.1f}% of the speed without a schema ({plain_s:.3f} s)")
        return self.rates("constrained", held_s, number * num_in, number * num_out) | {"plain_s": plain_s}

    def arrivals(self) -> dict[str, float]:
        """`--num-prompts` (100) requests by a clock (Poisson, `--rate` a second), 1024 -> 128, as a server sees them
        but without one: milliseconds to the first token and between tokens."""
        number = self.options.num_prompts or 100
        num_in, num_out = self.options.num_in or 1024, self.options.num_out or 128
        heard = run_arrivals(self.llm, self.prompts(number, num_in), greedy(num_out), self.options.rate)
        firsts = [1e3 * (one.times_s[0] - one.due_s) for one in heard]
        gaps = [1e3 * (b - a) for one in heard for a, b in itertools.pairwise(one.times_s)]
        found = {
            f"{name}_p{p}_ms": at(values, p) for name, values in (("ttft", firsts), ("itl", gaps)) for p in (50, 99)
        }
        show(f"arrivals {self.options.rate:g}/s: " + ", ".join(f"{name} {ms:.1f}" for name, ms in found.items()))
        return found

    def best(self, once: Callable[[], float]) -> float:
        return min(once() for _ in range(self.options.repeat))

    @staticmethod
    def rates(name: str, elapsed_s: float, num_in: int, num_out: int) -> dict[str, float]:
        show(f"{name}: {elapsed_s:.3f} s, {num_in / elapsed_s:.0f} tokens/s in, {num_out / elapsed_s:.0f} tokens/s out")
        return {
            "s": elapsed_s,
            "in_tokens": num_in,
            "out_tokens": num_out,
            "in_tokens_per_s": num_in / elapsed_s,
            "out_tokens_per_s": num_out / elapsed_s,
        }


WORKLOADS: dict[str, Callable[[Bench], Any]] = {
    "decode": Bench.decode,
    "throughput": Bench.throughput,
    "random": Bench.random_lengths,
    "prefill": Bench.prefill,
    "prefix": Bench.shared_prefix,
    "sampled": Bench.sampled,
    "constrained": Bench.constrained,
    "arrivals": Bench.arrivals,
}


class Heard:
    """Takes a request's deltas, and notes when its tokens came."""

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.times_s: list[float] = []

    def push(self, delta: Any) -> None:
        self.times_s += [time.perf_counter()] * len(delta.token_ids)

    def finish(self, error: OctavoError | None) -> None:
        assert error is None, error


def run_arrivals(llm: Any, prompts: list[list[int]], params: SamplingParams, rate: float) -> list[Heard]:
    """Hand requests to the engine of `llm` when their time comes, and step it, as its process does for a server."""
    rng = random.Random(3)
    requests = [llm._factory.prepare(prompt, params) for prompt in prompts]
    heard: list[Heard] = []
    due_s = time.perf_counter()
    while len(heard) < len(requests) or llm._router:
        now_s = time.perf_counter()
        if len(heard) < len(requests) and now_s >= due_s:
            heard.append(Heard(due_s))
            llm._router.submit(requests[len(heard) - 1], heard[-1])
            due_s += rng.expovariate(rate)
        elif llm._router or llm._loop.core.has_work():
            llm._step()
            for body in llm._loop.core.take_frames():
                llm._router.feed(body)
        else:
            began_s = time.perf_counter()
            name = next(llm._loop.runner.chores, None)
            if name is not None and time.perf_counter() - began_s > SLOW_CHORE_S:
                show(f"a chore took {1e3 * (time.perf_counter() - began_s):.0f} ms: {name}")
    llm._settle()
    return heard


def at(values: list[float], percent: float) -> float:
    """The value that `percent` % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def greedy(num_out: int) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_out)


def show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def machine(device: str) -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    is_cuda = device.startswith("cuda") and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if is_cuda else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
    }


def make_parser() -> Parser:
    sections = tuple(ENGINE_SECTIONS)
    parser = command_parser("bench", Command("Offline speed of LLM.", sections, lambda values: 0))
    parser.usage = "offline.py [--shape NAME | --model MODEL] [options] WORKLOAD..."
    group = parser.add_argument_group("bench")
    group.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    group.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    group.add_argument("--batch", default="1,8,32,64,128,256", help="batch sizes of decode (default: %(default)s)")
    group.add_argument("--num-prompts", type=int, help="instead of the workload's own number")
    group.add_argument("--num-in", type=int, help="prompt tokens, instead of the workload's own number")
    group.add_argument("--num-out", type=int, help="output tokens, instead of the workload's own number")
    group.add_argument("--repeat", type=int, default=2, help="runs, of which the best counts (default: %(default)s)")
    group.add_argument("--rate", type=float, default=10.0, help="requests a second of arrivals (default: %(default)s)")
    group.add_argument("--served", action="store_true", help="plan steps as a server does (--max-itl-ms derived)")
    group.add_argument("--trace", type=Path, help="trace every step: a table to stderr, the steps to FILE.WORKLOAD")
    group.add_argument("--kernels", action="store_true", help="profile every call: kernels and gaps, to stderr")
    group.add_argument("--json", type=Path, help="write the result here instead of to stdout")
    return parser


def run_workload(bench: Bench, name: str, trace_file: Path | None) -> Any:
    """One workload, traced if asked to."""
    if trace_file is None:
        return WORKLOADS[name](bench)
    trace = Trace(bench.llm._loop)
    try:
        return WORKLOADS[name](bench)
    finally:
        steps = trace.end()
        show(f"-- trace of {name}\n{summary(steps)}")
        write(steps, trace_file.with_name(f"{trace_file.name}.{name}"))


def load(values: dict[str, Any], *, served: bool) -> Any:
    """An `LLM`. `served`: its steps are planned as a server's are, and what a server does when it is idle is done."""
    from octavo import LLM
    from octavo.engine.build import build_engine

    if not served:
        return LLM(**values)
    with mock.patch("octavo.llm.build_engine", lambda config, progress, bounded: build_engine(config, progress)):
        llm = LLM(**values)
    show(f"{sum(1 for _ in llm._loop.runner.chores)} chores")
    return llm


def run(arguments: argparse.Namespace, values: dict[str, Any]) -> dict[str, Any]:
    """Load, run the workloads, and say what was measured where."""
    start = time.perf_counter()
    with load(values, served=arguments.served) as llm:
        start_s = time.perf_counter() - start
        bench = Bench(llm, arguments)
        first_s = bench.seconds(bench.prompts(1, 16), greedy(1))
        show(f"ready in {start_s:.1f} s, first token {first_s:.2f} s later")
        results = {name: run_workload(bench, name, arguments.trace) for name in arguments.workloads}
        return {
            "machine": machine(llm.facts.device),
            "model": arguments.shape or values["model"],
            "options": changed(make_engine_config(values)),
            "resolved": changed(llm.config),
            "start_s": start_s,
            "first_token_s": first_s,
            "results": results,
        }


def main() -> int:
    parser = make_parser()
    try:
        arguments = parser.parse_args()
        # argparse gives the first word to MODEL; here all words are workloads.
        arguments.workloads = [word for word in [arguments.model_name, *arguments.workloads] if word]
        arguments.model_name = None
        arguments.batch = [int(part) for part in arguments.batch.split(",")]
        values = read_values(arguments, tuple(ENGINE_SECTIONS))
        unknown = [word for word in arguments.workloads if word not in WORKLOADS]
        if unknown or not arguments.workloads or bool(arguments.shape) == bool(values.get("model")):
            parser.error(f"give --shape or --model, and workloads out of {', '.join(WORKLOADS)}; got {unknown}")
        with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
            if arguments.shape:
                write_shape(arguments.shape, Path(folder))
                values = {"load_format": "dummy", **values, "model": folder}
            result = json.dumps(run(arguments, values), indent=2)
    except OctavoError as error:
        show(f"offline.py: error: {error}")
        return error.exit_code
    if arguments.json:
        arguments.json.write_text(result + "\n")
    else:
        print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
