"""Cache groups on a GPU: whole engines with them and without give the same tokens, through CUDA graphs and chunks.

    PYTHONPATH=python python tests/models/gpu_groups.py [--only gemma3,mistral-window]

The first run of both engines has the same steps, so tokens must be equal; the second finds prefixes, whose chunks end
elsewhere, so that few may differ by rounding. Hybrids, whose states have no engine without groups, give in fp32 the
tokens that the CPU gives, but for near ties. `tests/run` does not run this file (no test_ prefix). Exit code 1 when
something is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tiny_models import make_reference, save

from octavo import LLM, SamplingParams

CASES = ("gemma3", "gemma2", "mistral-window", "olmo3")
HYBRIDS = ("qwen3-next", "nemotron-h", "granite-hybrid", "falcon-h1")
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "block_size": 16,
    "num_gpu_blocks_override": 800,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "max_model_len": 128,
}
PROMPTS = [[5 + (i * i + count) % 90 for i in range(count)] for count in range(3, 99, 4)]
LEAST_SHARE = 0.9


def run(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=29, temperature=0.0, ignore_eos=True, detokenize=False)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def share(found: list[list[int]], wanted: list[list[int]]) -> float:
    """Of tokens that are equal."""
    pairs = [(a, b) for ours, theirs in zip(found, wanted, strict=True) for a, b in zip(ours, theirs, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def problems(model: str, *, is_hybrid: bool) -> list[str]:
    """What is wrong with a checkpoint's engines."""
    ours = {**OPTIONS, "dtype": "float32"} if is_hybrid else OPTIONS
    others = {**ours, "device": "cpu", "runner": "torch"} if is_hybrid else {**OPTIONS, "cache_groups": False}
    with LLM(model, **others) as llm:
        wanted = run(llm)
    print("  the other engine has run", flush=True)
    with LLM(model, **ours) as llm:
        print("  loaded", flush=True)
        first, again, stats = run(llm), run(llm), llm.stats()
    print(f"  equal at first {share(first, wanted):.3f}, with prefixes {share(again, wanted):.3f}, {stats}", flush=True)
    found = []
    if first != wanted and not (is_hybrid and share(first, wanted) >= LEAST_SHARE):
        found.append(f"{share(first, wanted):.3f} of the tokens are equal")
    if share(again, wanted) < LEAST_SHARE:
        found.append(f"{share(again, wanted):.3f} of the tokens are equal with prefixes")
    if stats["prefix_hit_tokens"] < sum(map(len, PROMPTS)) // 2:
        found.append(f"{stats['prefix_hit_tokens']} tokens were found in the cache")
    if stats["num_free_blocks"] != stats["num_blocks"]:
        found.append("blocks are missing")
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(CASES + HYBRIDS))
    failed = 0
    for case in parser.parse_args().only.split(","):
        print(case, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = problems(str(save(make_reference(case), Path(folder))), is_hybrid=case in HYBRIDS)
        failed += bool(found)
        for problem in found:
            print(f"  WRONG: {problem}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
