"""Hybrids in whole engines, attention beside states in one pool: Transformers' tokens, however prompts are cut, packed,
found as prefixes, and pushed out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_reference, save

from octavo import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "runner": "torch",
    "device": "cpu",
    "dtype": "float32",
    "block_size": 8,
    "num_gpu_blocks_override": 128,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "max_model_len": 128,
    "cpu_threads": 1,
}
CASES = ("qwen3-next", "granite-hybrid", "nemotron-h-experts", "falcon-h1")
PROMPTS = [[5 + (i * i) % 90 for i in range(count)] for count in (1, 40, 71, 17, 2)]
COUNT = 16
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut": {"max_num_batched_tokens": 7},
    "overlapped": {"block_size": 5, "overlap_depth": 2},
    "starved": {"num_gpu_blocks_override": 24, "attention_backend": "reference"},
}
RUNS = [
    *((CASES[0], change) for change in CHANGES),
    *((case, change) for case in CASES[1:] for change in ("overlapped", "starved")),
]
Made = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A case's checkpoint, and Transformers' greedy tokens, each from the whole sequence."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def find(case: str) -> tuple[Path, list[list[int]]]:
        if case not in made:
            model = make_reference(case)
            made[case] = save(model, tmp_path_factory.mktemp(case)), [greedy(model, prompt) for prompt in PROMPTS]
        return made[case]

    return find


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(COUNT):
        logits = model(torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def run(llm: LLM, **params: Any) -> list[list[int]]:
    values = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "detokenize": False, **params}
    outputs = llm.generate(PROMPTS, SamplingParams(**values))
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize(("case", "change"), RUNS)
def test_tokens_are_those_of_transformers(make: Made, case: str, change: str) -> None:
    folder, wanted = make(case)
    with LLM(str(folder), **{**OPTIONS, **CHANGES[change]}) as llm:
        assert run(llm) == wanted
        before = llm.stats()
        assert run(llm) == wanted
        sampled = {"n": 3, "temperature": 0.8, "seed": 5}
        assert run(llm, **sampled) == run(llm, **sampled)
        stats = llm.stats()
        if change == "starved":
            assert stats["num_preemptions"] > 0
        else:
            assert stats["prefix_hit_tokens"] - before["prefix_hit_tokens"] >= 100
        assert stats["num_free_blocks"] == stats["num_blocks"]


@pytest.mark.parametrize("case", CASES)
def test_one_pool_has_both_kinds(make: Made, case: str) -> None:
    """By default, blocks whose keys and values are about as large as a state; a lane has either."""
    folder, wanted = make(case)
    options = {name: value for name, value in OPTIONS.items() if name != "block_size"}
    with LLM(str(folder), **{**options, "max_num_batched_tokens": 128}) as llm:
        assert run(llm) == wanted
        plan = llm._loop.runner.plan
        kinds = [plan.layout.keeps[group].kind for group in plan.layout.layer_groups]
        assert {"all", "state"} == set(kinds)
        assert plan.limits.block_size % 64 == 0
        assert "layers keep states" in plan.report()
        cache = llm._loop.runner._kv_cache
        assert sum(lane.nbytes for lane in cache.lanes) == plan.kv_bytes
        assert len(cache.lanes) == plan.layout.num_lanes < len(cache.layers)
