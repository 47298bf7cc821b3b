"""The runner under the real control plane: however steps are cut, batched, preempted or overlapped, every request gets
the tokens that it gets alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 400,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 128,
    "cpu_threads": 1,
    "use_tqdm": False,
}
SHARED = [5, 9, 17, 33, 64, 100, 7, 21, 12, 54]
PROMPTS = [[3 + i, *SHARED, 40 + i][i % 2 :] * (1 + i % 3) for i in range(10)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=17, temperature=0.7, top_p=0.9, top_k=40),
    SamplingParams(temperature=0.0, max_tokens=30, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=3),
    SamplingParams(seed=4, max_tokens=24, presence_penalty=1.0, min_p=0.05, n=3),
    SamplingParams(temperature=0.0, max_tokens=12, min_tokens=6, stop_token_ids=list(range(0, 131, 2))),
    SamplingParams(seed=5, max_tokens=21, allowed_token_ids=list(range(20, 60)), logit_bias={30: 3.0}),
    SamplingParams(seed=6, max_tokens=9, prompt_logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=2**62, max_tokens=1),
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "depth-2": {"overlap_depth": 2},
    "depth-3": {"overlap_depth": 3},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "preemption": {"num_gpu_blocks_override": 40},
    "preemption-depth-2": {"num_gpu_blocks_override": 40, "overlap_depth": 2, "max_num_batched_tokens": 19},
    "no-prefix-cache": {"enable_prefix_caching": False, "overlap_depth": 2},
    "reference-attention": {"attention_backend": "reference"},
}


def outcome(output: Any) -> tuple[Any, ...]:
    """What must not depend on the schedule: tokens, ends, and the tokens and ranks that logprobs name."""
    prompt = output.prompt_logprobs and [
        at and {i: entry.rank for i, entry in at.items()} for at in output.prompt_logprobs
    ]
    sequences = []
    for one in output.outputs:
        logprobs = one.logprobs and [{i: entry.rank for i, entry in at.items()} for at in one.logprobs]
        sequences.append((one.index, list(one.token_ids), one.finish_reason, one.stop_reason, logprobs))
    return prompt, sorted(sequences)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[Any, ...]]:
    with LLM(str(folder), **OPTIONS) as llm:
        return [outcome(llm.generate([prompt], p)[0]) for prompt, p in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_same(name: str, folder: Path, alone: list[tuple[Any, ...]]) -> None:
    with LLM(str(folder), **{**OPTIONS, **SCHEDULES[name]}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        again = llm.generate(PROMPTS[::-1], PARAMS[::-1])[::-1]
        preemptions = llm.stats()["num_preemptions"]
    assert [outcome(output) for output in outputs] == alone
    assert [outcome(output) for output in again] == alone
    assert (preemptions > 0) == name.startswith("preemption")


def test_greedy_sequences_are_transformers(alone: list[tuple[Any, ...]], greedy: Any) -> None:
    for number in (0, 8):
        ((_, tokens, *_),) = alone[number][1]
        assert tokens == greedy(PROMPTS[number], len(tokens))
    assert len(alone[8][1][0][1]) == 40
