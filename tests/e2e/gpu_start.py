"""Where the time of a start goes on a CUDA device, and which kernels it had to compile itself; run by hand.

    python tests/e2e/gpu_start.py --shape llama-3.1-8b

Two starts, each in a new process: with an empty folder for compiled kernels, then with what the first left there. Shown
of each: when every stage began, when the first token and a few decode steps of several sizes were done, and the kernels
that Triton compiled in the engine's own process, as the build ahead did not have them (there should be none).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benches"))
from offline import SHAPES, write_shape

PROGRAM = """
import json, sys, time
began = float(sys.argv[1])
times, last = {}, [None]
def progress(stage, fraction):
    if stage != last[0] and "\\n" not in stage:
        last[0] = stage
        times[f"{stage} begins"] = round(time.time() - began, 2)
missed = []
def watch():
    from triton import knobs
    def heard(*, src, cache_hit, **_):
        if not cache_hit:
            missed.append(getattr(src, "name", str(src)))
    knobs.compilation.listener = heard
import octavo.engine.progress
def shown(self, stage, fraction):
    progress(stage, fraction)
    if "torch" in sys.modules:
        watch()
octavo.engine.progress.LoadBar.__call__ = shown
from octavo import LLM, SamplingParams
with LLM(sys.argv[2], load_format="dummy", **json.loads(sys.argv[3])) as llm:
    times["ready"] = round(time.time() - began, 2)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    times["first token"] = round(time.time() - began, 2)
    for rows in (1, 5, 20, 60, 120, 200):
        params = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=4, ignore_eos=True)
        llm.generate([[1, 2, 3]] * rows, params, use_tqdm=False)
    times["six batches"] = round(time.time() - began, 2)
print(json.dumps({"times": times, "missed": missed}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--options", default="{}", help="engine options as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as cache:
        write_shape(args.shape, Path(model))
        for kind in ("cold", "warm"):
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            command = [sys.executable, "-c", PROGRAM, str(time.time()), model, args.options]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=300, check=True)
            results[kind] = json.loads(done.stdout.splitlines()[-1])
            print(kind, json.dumps(results[kind]["times"]))
            print(f"  compiled in the engine: {sorted(set(results[kind]['missed']))}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
