"""Whole engines with cache groups and without: the same tokens, whatever is shared, cut or pushed out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_reference, save

from octavo import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "cpu_threads": 1,
}
PROMPTS = [[5 + (i * i) % 90 for i in range(count)] for count in (3, 50, 71, 17, 33)]


def run(llm: LLM, **params: Any) -> list[list[int]]:
    values = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, "detokenize": False, **params}
    outputs = llm.generate(PROMPTS, SamplingParams(**values))
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in made:
            made[case] = save(make_reference(case), tmp_path_factory.mktemp(case))
        return made[case]

    return make


ENGINES: dict[str, dict[str, Any]] = {
    "reference": {"runner": "torch", "attention_backend": "reference"},
    "cpu": {"runner": "torch", "attention_backend": "cpu", "overlap_depth": 2},
    "embedded": {"runner": "embedded"},
}
FEW_BLOCKS = {"gemma2": 40, "gemma3": 40, "mistral-window": 10}
"""Fewer than the sequences of a step hold; there are no layers that keep all in the last."""
CASES = [
    ("gemma2", "cpu"),
    ("gemma3", "cpu"),
    ("gemma3", "reference"),
    ("gemma3", "embedded"),
    ("mistral-window", "cpu"),
    ("mistral-window", "embedded"),
    ("gemma2", "embedded"),
]


@pytest.mark.parametrize(("case", "engine"), CASES)
def test_tokens_are_the_same(checkpoint: Callable[[str], Path], case: str, engine: str) -> None:
    """Chunks, then prefixes longer than the window, several sequences of one prompt, and a starved cache."""
    model, options = str(checkpoint(case)), {**OPTIONS, **ENGINES[engine]}
    sampled = {"n": 3, "temperature": 0.9, "seed": 3}
    with LLM(model, cache_groups=False, **options) as llm:
        wanted, wanted_sampled = run(llm), run(llm, **sampled)
    with LLM(model, **options) as llm:
        assert run(llm) == wanted
        hits = llm.stats()["prefix_hit_tokens"]
        assert run(llm) == wanted
        assert llm.stats()["prefix_hit_tokens"] - hits >= 140
        assert run(llm, **sampled) == wanted_sampled
        stats = llm.stats()
        assert stats["num_free_blocks"] == stats["num_blocks"]
    with LLM(model, **{**options, "num_gpu_blocks_override": FEW_BLOCKS[case], "max_model_len": 104}) as llm:
        assert run(llm) == wanted
        assert run(llm, **sampled) == wanted_sampled
        assert llm.stats()["num_preemptions"] > 0
