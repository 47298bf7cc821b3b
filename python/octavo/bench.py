"""`octavo bench latency|throughput`: the speed of one model on this machine, beside what the machine can do at most.

Random prompts, greedy, past the end of text; the time of `LLM.generate`, from ids to finished outputs. Not here: a
server under load (benches/serve.py of the repository), other engines (benches/cpu.py, benches/h200.py).
"""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.config import BenchConfig, EngineConfig, make_bench_config, make_engine_config, section_options
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.protocol import unwatched
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.worker.memory import MemoryPlan


class Run(NamedTuple):
    """What a batch took."""

    seconds: float
    num_steps: int


class Bench:
    """A loaded model, and what it may cost."""

    def __init__(self, values: dict[str, Any]) -> None:
        from octavo.pooling.recipe import choose_task
        from octavo.worker.choice import choose_plan
        from octavo.worker.limits import measure_limits

        own = {opt.name for opt in section_options("bench")}
        self.bench: BenchConfig = make_bench_config({name: v for name, v in values.items() if name in own})
        self.engine = {name: value for name, value in values.items() if name not in own}
        config: EngineConfig = make_engine_config(self.engine)
        task = choose_task(config.model, unwatched)
        if task != "generate":
            raise ConfigError(f"this model's task is {task}: bench times models that generate text")
        plan = choose_plan(config)
        _check(self.bench, plan)
        self.weight_bytes = plan.usage.weight_bytes
        self.limits = measure_limits(plan.device, plan.limits.cpu_threads)
        print(f"machine     {self.limits.report()}", flush=True)
        self._random = random.Random(config.model.seed)

    def start(self) -> None:
        began = time.perf_counter()
        self.llm = LLM(**self.engine)
        seconds = time.perf_counter() - began
        weights = f"{self.weight_bytes / 1e6:,.0f} MB of weights"
        print(f"model       {self.engine['model']}: {weights}, loaded in {seconds:.1f} s", flush=True)

    def run(self, batch_size: int, output_len: int) -> Run:
        """A batch of fresh prompts."""
        last = self.llm.facts.vocab_size - 1
        prompts = [[self._random.randint(1, last) for _ in range(self.bench.input_len)] for _ in range(batch_size)]
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        num_before = self.llm.stats()["num_steps"]
        began = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return Run(seconds, self.llm.stats()["num_steps"] - num_before)


def _check(bench: BenchConfig, plan: MemoryPlan) -> None:
    """ConfigError for a shape that the model, or a step, has no room for."""
    num_tokens = bench.input_len + bench.output_len
    if num_tokens > plan.max_model_len:
        raise ConfigError(
            f"--input-len {bench.input_len} and --output-len {bench.output_len}: together more than the context of "
            f"{plan.max_model_len} tokens",
            "input_len",
        )
    if bench.batch_size > plan.limits.max_num_seqs:
        raise ConfigError(
            f"--batch-size {bench.batch_size}: a step has at most {plan.limits.max_num_seqs} sequences; add "
            f"--max-num-seqs {bench.batch_size}",
            "batch_size",
        )


def latency(values: dict[str, Any]) -> int:
    """One batch after the other."""
    bench = Bench(values)
    bench.start()
    options = bench.bench
    for _ in range(options.num_iters_warmup):
        bench.run(options.batch_size, options.output_len)
    first = [bench.run(options.batch_size, 1) for _ in range(options.num_iters)]
    whole = [bench.run(options.batch_size, options.output_len) for _ in range(options.num_iters)]
    shape = f"batch {options.batch_size}, {options.input_len} in, {options.output_len} out"
    took = sorted(1000 * run.seconds for run in whole)
    times = f"median {statistics.median(took):,.2f} ms, from {took[0]:,.2f} to {took[-1]:,.2f}"
    print(f"latency     {shape}: {times} ({options.num_iters} runs)")
    print(f"first token {statistics.median(run.seconds for run in first) * 1000:,.1f} ms")
    best, start = min(whole), min(first)
    _print_decoding(bench, Run(best.seconds - start.seconds, best.num_steps - start.num_steps))
    bench.llm.close()
    return 0


def _print_decoding(bench: Bench, run: Run) -> None:
    """Of the tokens behind the first, if there were enough of them to tell. A step reads all weights once, whatever the
    batch (but those of experts that no token chooses); with speculation there are fewer steps than tokens."""
    num_tokens = bench.bench.output_len - 1
    if not num_tokens or run.seconds <= 0 or run.num_steps <= 0:
        return
    token_s, step_s = run.seconds / num_tokens, run.seconds / run.num_steps
    rate = bench.weight_bytes / step_s
    share = rate / bench.limits.read_bytes
    print(f"decoding    {token_s * 1000:.2f} ms a token, {bench.bench.batch_size / token_s:,.1f} tokens/s")
    steps = f"{run.num_steps} steps of {step_s * 1000:.2f} ms"
    print(f"reading     {rate / 1e9:,.1f} GB/s of weights in {steps}, {share:.0%} of what the machine reads")


def throughput(values: dict[str, Any]) -> int:
    """Many requests at once."""
    bench = Bench(values)
    bench.start()
    options = bench.bench
    bench.run(1, 2)
    seconds = bench.run(options.num_prompts, options.output_len).seconds
    out, total = (options.num_prompts * n for n in (options.output_len, options.input_len + options.output_len))
    print(f"throughput  {options.num_prompts} x ({options.input_len} in, {options.output_len} out): {seconds:.2f} s")
    print(f"            {options.num_prompts / seconds:.2f} requests/s, {total / seconds:,.0f} tokens/s")
    print(f"output      {out / seconds:,.0f} tokens/s")
    bench.llm.close()
    return 0
