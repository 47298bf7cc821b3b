"""Every workload of the H200 table in one run, within a time budget, beside vLLM's figures and goals (h200_rows.py).

    python benches/h200.py                                  # all, in order of importance
    python benches/h200.py --budget 400 llama qwen-0.6b.random serve
    python benches/h200.py --set max_num_seqs=512 llama.throughput

A workload is a model of `PARTS`, all its parts or one (`model.part`). Each model runs in a process of its own, loaded
once, after a check: a model of the same shape with two layers must choose the tokens that the eager reference path
chooses, wherever that one is sure. What would not end within the budget is left out. Rows are merged into `--out`,
where those that were not measured now stay as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import serve
import startup
from h200_check import check
from h200_rows import DECODE, ROWS, SERVED
from offline import Bench, machine, show
from shapes import write_shape

RESULTS = Path(__file__).parent / "results" / "h200.json"
Figures = dict[tuple[str, str], float]
"""(workload, metric) of `ROWS` -> value."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a model, measured together. `seconds` is what it takes, roughly."""

    seconds: float
    measure: Callable[[Bench, str], Figures]


def options(**values: Any) -> argparse.Namespace:
    """What `Bench` reads of its command line."""
    return argparse.Namespace(
        **{"batch": [], "num_prompts": None, "num_in": None, "num_out": None, "kernels": False, **values}
    )


def decode(bench: Bench, model: str) -> Figures:
    bench.options = options(batch=list(DECODE[model]), repeat=bench.options.repeat)
    steps = bench.decode()
    return {(f"{model} decode, batch {batch}", "step"): entry["step_ms"] for batch, entry in steps.items()}


def decode_long(bench: Bench, model: str) -> Figures:
    bench.options = options(batch=[64], num_in=4096, repeat=1)
    return {(f"{model} decode, batch 64, context 4096", "step"): bench.decode()["64"]["step_ms"]}


def throughput(bench: Bench, model: str) -> Figures:
    number, num_out = (256, 128) if model.startswith("moe") else (512, 256)
    bench.options = options(num_prompts=number, num_out=num_out, repeat=bench.options.repeat)
    rate = bench.throughput()["out_tokens_per_s"]
    return {(f"{model} {number} x (1024 -> {num_out})", "out tokens/s"): rate}


def random_lengths(bench: Bench, model: str) -> Figures:
    bench.options = options(repeat=bench.options.repeat + 1)
    rate = bench.random_lengths()["out_tokens_per_s"]
    return {(f"{model} 256 x (100..1024 -> 100..1024), T 0.6", "out tokens/s"): rate}


def prefill(bench: Bench, model: str) -> Figures:
    bench.options = options(repeat=bench.options.repeat)
    many, one = bench.prefill().values()
    return {
        (f"{model} 64 x (2048 -> 1)", "in tokens/s"): many["in_tokens_per_s"],
        (f"{model} 1 x (2048 -> 1)", "time"): one["s"],
    }


def shared_prefix(bench: Bench, model: str) -> Figures:
    bench.options = options()
    bench.shared_prefix()  # kernels compile
    times = bench.shared_prefix()
    return {(f"{model} 256 x (2048 shared + 64 -> 64)", kind): times[f"{kind}_s"] for kind in ("cold", "warm")}


def sampled(bench: Bench, model: str) -> Figures:
    bench.options = options(repeat=bench.options.repeat + 1)
    return {(f"{model} 128 x (128 -> 128), T 1", "out tokens/s"): bench.sampled()["out_tokens_per_s"]}


PARTS: dict[str, dict[str, Part]] = {
    "llama": {
        "decode": Part(16, decode),
        "throughput": Part(45, throughput),
        "prefill": Part(8, prefill),
        "prefix": Part(9, shared_prefix),
        "sampled": Part(5, sampled),
        "long": Part(20, decode_long),
    },
    "qwen-0.6b": {"decode": Part(8, decode), "random": Part(20, random_lengths)},
    "llama-fp8": {"decode": Part(10, decode), "throughput": Part(35, throughput), "prefill": Part(6, prefill)},
    "moe": {"decode": Part(20, decode), "throughput": Part(20, throughput), "prefill": Part(6, prefill)},
    "moe-fp8": {"decode": Part(14, decode), "throughput": Part(16, throughput), "prefill": Part(5, prefill)},
    "qwen-8b": {"decode": Part(9, decode), "throughput": Part(45, throughput)},
}
SHAPES = {
    "llama": "llama-3.1-8b",
    "llama-fp8": "llama-3.1-8b",
    "qwen-8b": "qwen3-8b",
    "qwen-0.6b": "qwen3-0.6b",
    "moe": "qwen3-30b-a3b",
    "moe-fp8": "qwen3-30b-a3b",
}
ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    "llama-fp8": {"quantization": "fp8"},
    "qwen-0.6b": {"max_model_len": 4096},
    "moe": {"max_model_len": 8192},
    "moe-fp8": {"max_model_len": 8192, "quantization": "fp8"},
}
LOAD_S = {"moe": 45.0, "moe-fp8": 45.0}
"""Loading a model and its check; else `DEFAULT_LOAD_S`."""
DEFAULT_LOAD_S = 30.0
RATES = {"at once": (256, math.inf, 20.0), "10/s": (200, 10.0, 25.0), "20/s": (300, 20.0, 20.0)}
"""Rate of `SERVED` -> (requests, requests a second, seconds it takes)."""
NOISE = 0.01
"""Runs of the same thing differ by more."""
START_S = {"llama": 90.0, "moe": 60.0}


def run_model(name: str, parts: list[str], args: argparse.Namespace, deadline_s: float) -> Figures:
    """The parts of one model in a process of its own, which is ended at the deadline; what it wrote until then."""
    with tempfile.TemporaryDirectory(prefix="octavo-h200-") as folder:
        out = Path(folder, "figures")
        command = [sys.executable, __file__, "--child", "--out", str(out), "--repeat", str(args.repeat)]
        command += ["--budget", str(deadline_s - time.monotonic()), *(["--no-check"] if args.no_check else [])]
        command += [f"--set={option}" for option in args.set] + [f"{name}.{part}" for part in parts]
        try:
            code = subprocess.run(command, timeout=max(1.0, deadline_s - time.monotonic())).returncode
            if code:
                show(f"{name}: FAILED with exit code {code}")
        except subprocess.TimeoutExpired:
            show(f"{name}: out of time")
        lines = out.read_text().splitlines() if out.exists() else []
        return {(workload, metric): value for workload, metric, value in map(json.loads, lines)}


def child(wanted: dict[str, list[str]], args: argparse.Namespace, deadline_s: float) -> None:
    """One model: check, load, measure; every figure goes to `--out` at once, one JSON list a line."""
    from octavo import LLM

    ((name, parts),) = wanted.items()
    engine_options = ENGINE_OPTIONS.get(name, {}) | settings(args)
    if not args.no_check:
        try:
            show(f"{name}: {check(SHAPES[name], engine_options)}")
        except Exception:
            traceback.print_exc()
            show(f"{name}: the check COULD NOT RUN; what follows is not checked")
    known = {row.key for row in ROWS}
    with tempfile.TemporaryDirectory(prefix="octavo-h200-") as folder, args.out.open("a") as out:
        write_shape(SHAPES[name], Path(folder))
        with LLM(folder, load_format="dummy", **engine_options) as llm:
            began_s = time.monotonic()
            count = sum(1 for _ in llm._loop.runner.chores)  # as an engine does that has been idle for a while
            show(f"{name}: {count} chores in {time.monotonic() - began_s:.1f} s")
            bench = Bench(llm, options(repeat=args.repeat))
            for part in parts:
                if time.monotonic() + PARTS[name][part].seconds > deadline_s:
                    show(f"{name}.{part}: left out, no time")
                    continue
                for key, value in PARTS[name][part].measure(bench, name).items():
                    if key in known:
                        print(json.dumps([*key, value]), file=out, flush=True)
                bench.options.repeat = args.repeat


def run_serve(rates: list[str], args: argparse.Namespace, deadline_s: float) -> Figures:
    """One server of the Llama shape, warmed by a short load, then the rates one after another."""
    figures: Figures = {}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings(args).items()]
    port = startup.free_port()
    common = [f"--url=http://127.0.0.1:{port}", "--vocab-low=100"]
    with tempfile.TemporaryDirectory(prefix="octavo-h200-") as folder:
        write_shape(SHAPES["llama"], Path(folder))
        with serve.Spawned([folder, "--load-format", "dummy", *flags], port, deadline_s - time.monotonic()) as server:
            serve.warm(serve.parse_args([*common, "--input-len=1024"]), server)
            for rate in rates:
                number, per_second, seconds = RATES[rate]
                if time.monotonic() + seconds > deadline_s:
                    show(f"serve.{rate}: left out, no time")
                    continue
                load = [f"--num-requests={number}", f"--rate={per_second}", f"--seed={list(RATES).index(rate)}"]
                load += ["--input-len=1024", "--output-len=128"]
                figures |= served_figures(rate, serve.measure(serve.parse_args([*common, *load]), server))
    return figures


def served_figures(rate: str, summary: dict[str, Any]) -> Figures:
    """A load's summary as rows of the table."""
    figures = {}
    for metric in SERVED[rate]:
        what, _, percentile = metric.partition(" ")
        value = summary["output_tokens_per_s"] if what == "out" else summary[f"{what.lower()}_ms"][percentile]
        figures[f"llama served 1024 -> 128, {rate}", metric] = value
    return figures


def run_start(name: str, args: argparse.Namespace) -> Figures:
    """Cold and warm start; of Llama also the server's."""
    with tempfile.TemporaryDirectory(prefix="octavo-h200-") as folder:
        write_shape(SHAPES[name], Path(folder))
        engine_options = {"model": folder, "load_format": "dummy", **ENGINE_OPTIONS.get(name, {}), **settings(args)}
        if name == "llama":
            times = startup.measure(engine_options, 1)
            return {
                ("llama start", f"{title}, {kind}"): times[kind][measured]
                for kind in ("cold", "warm")
                for title, measured in (
                    ("process to first token", "llm_first_token_s"),
                    ("serve to ready", "serve_ready_s"),
                )
            }
        with tempfile.TemporaryDirectory(prefix="octavo-kernels-") as kernels:
            cold = startup.time_llm(engine_options, kernels)
        return {(f"{name} start", "process to first token, cold"): cold["llm_first_token_s"]}


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Engine options of `--set NAME=VALUE`."""
    return {name: startup.value_of(text) for name, _, text in (option.partition("=") for option in args.set)}


DEFAULT_ORDER = ("llama", "qwen-0.6b", "serve", "start.llama", "llama-fp8", "moe", "moe-fp8", "qwen-8b", "start.moe")


def choose(words: list[str]) -> dict[str, list[str]]:
    """Words of the command line -> group -> its parts."""
    groups = {name: list(parts) for name, parts in PARTS.items()}
    groups |= {"serve": list(RATES), "start": list(START_S)}
    wanted: dict[str, list[str]] = {}
    for word in words or DEFAULT_ORDER:
        group = next((name for name in groups if word == name or word.startswith(f"{name}.")), "")
        part = word[len(group) + 1 :]
        if not group or (part and part not in groups[group]):
            raise SystemExit(f"h200.py: {word}: no such workload; there are {groups}")
        wanted.setdefault(group, []).extend([part] if part else groups[group])
    return wanted


def run_all(wanted: dict[str, list[str]], args: argparse.Namespace, deadline_s: float) -> Figures:
    """Group after group; saved after each."""
    figures: Figures = {}
    for group, parts in wanted.items():
        left_s = deadline_s - time.monotonic()
        show(f"-- {group}: {', '.join(parts)} ({left_s:.0f} s left)")
        if group == "serve":
            found = run_serve(parts, args, deadline_s) if left_s > DEFAULT_LOAD_S else {}
        elif group == "start":
            found = {}
            for name in parts:
                if START_S[name] < deadline_s - time.monotonic():
                    found |= run_start(name, args)
        elif left_s > LOAD_S.get(group, DEFAULT_LOAD_S):
            found = run_model(group, parts, args, deadline_s)
        else:
            found = {}
        figures |= found
        save(found, args)
    return figures


def save(figures: Figures, args: argparse.Namespace) -> None:
    """Merge figures into the results file; rows keep the date and commit of their own measurement."""
    old = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    rows = {(row["workload"], row["metric"]): row for row in old["rows"]}
    about = machine("cuda")
    commit = args.commit or about["commit"]
    now = datetime.now(UTC).isoformat(timespec="minutes")
    for row in ROWS:
        entry = {"octavo": None, **rows.get(row.key, {}), **asdict(row)}
        if row.key in figures:
            entry |= {"octavo": figures[row.key], "date": now, "commit": commit, "set": args.set}
        rows[row.key] = entry
    ordered = [rows[row.key] for row in ROWS]
    about |= {"card": about.pop("device"), "date": now, "commit": commit}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**about, "rows": ordered}, indent=1) + "\n")


def table(figures: Figures) -> str:
    """The figures beside vLLM's and the goals."""
    lines = [f"{'workload':<52}{'metric':<30}{'Octavo':>10}{'vLLM':>10}{'goal':>10}"]
    for row in ROWS:
        if row.key not in figures:
            continue
        value = figures[row.key]
        sign = 1 if row.better == "lower" else -1
        mark = "goal" if row.goal is not None and sign * value <= sign * row.goal else ""
        if row.vllm is not None and sign * (value - row.vllm) > 0:
            mark = "BEHIND" if abs(value - row.vllm) > NOISE * row.vllm else "even"
        numbers = "".join(f"{'' if v is None else f'{v:.4g}':>10}" for v in (value, row.vllm, row.goal))
        lines.append(f"{row.workload:<52}{row.metric:<30}{numbers}  {mark}")
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"default: {' '.join(DEFAULT_ORDER)}")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds that all may take (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=2, help="runs, of which the best counts (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an engine option")
    parser.add_argument("--no-check", action="store_true", help="do not compare with the reference first")
    parser.add_argument("--commit", help="commit to note, where git does not know it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="results to merge into (default: %(default)s)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    deadline_s = time.monotonic() + args.budget
    wanted = choose(args.workloads)
    if args.child:
        child(wanted, args, deadline_s)
        return 0
    figures = run_all(wanted, args, deadline_s)
    print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
