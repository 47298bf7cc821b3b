"""Numbers of the embedded runner do not depend on what is computed together.

A request gets the same bits alone and in a batch, its prompt whole and in chunks, with drafts and without, on one
thread and on several, beside requests that begin alike, with its prompt's log probabilities and without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from octavo import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "runner": "embedded",
    "block_size": 4,
    "num_gpu_blocks_override": 600,
    "max_num_seqs": 12,
    "max_model_len": 400,
    "enable_prefix_caching": False,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ALONE: dict[str, Any] = {"max_num_seqs": 1, "cpu_threads": 1, "speculative_config": "off"}
OTHERS: dict[str, dict[str, Any]] = {
    "on threads": {**ALONE, "cpu_threads": 2},
    "together": {"cpu_threads": 1, "speculative_config": "off"},
    "in chunks": {"cpu_threads": 2, "speculative_config": "off", "max_num_batched_tokens": 16},
    "with drafts": {"cpu_threads": 1, "speculative_config": NGRAM},
    "with drafts by measurement": {"cpu_threads": 3, "speculative_config": "auto"},
}
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}
Numbers = tuple[list[int], list[float], list[float]]


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of several pieces of columns, and weights enough for threads to share a token's step."""
    config = transformers.LlamaConfig(
        vocab_size=131,
        hidden_size=320,
        intermediate_size=1312,
        num_hidden_layers=6,
        num_attention_heads=5,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("wide")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def prompts() -> list[list[int]]:
    """Short and long ones, and one of more keys than a segment of attention; some repeat themselves."""
    generator = np.random.default_rng(8)
    sizes = (1, 5, 17, 40, 70, 300)
    found = [[int(token) for token in generator.integers(3, 131, size=size)] for size in sizes]
    return [*found, found[1] * 6, [7, 8, 9] * 12]


def numbers(folder: Path, options: dict[str, Any], groups: list[list[list[int]]]) -> list[Numbers]:
    """Tokens, their log probabilities and the prompts', of groups of prompts that run one after the other."""
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=0)
    hot = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    found: list[Numbers] = []
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        for params in (greedy, hot):
            for group in groups:
                for result in llm.generate(group, params):
                    output = result.outputs[0]
                    lines = (output.logprobs or (), (result.prompt_logprobs or ())[1:])
                    first, second = (
                        [entry.logprob for line in part if line for entry in line.values()] for part in lines
                    )
                    found.append((list(output.token_ids), first, second))
        if options["speculative_config"] is NGRAM:
            assert llm.stats()["num_accepted_tokens"] > 20
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_request_gets_the_same_bits(wide_folder: Path, name: str) -> None:
    expected = numbers(wide_folder, {**FORMATS[name], **ALONE}, [[prompt] for prompt in prompts()])
    assert len({tuple(tokens) for tokens, _, _ in expected}) > 10
    for other, options in OTHERS.items():
        found = numbers(wide_folder, {**FORMATS[name], **options}, [prompts()])
        assert found == expected, other


def alike() -> list[list[int]]:
    """Prompts that share more keys than a segment of attention, and some of them another one's end besides."""
    generator = np.random.default_rng(9)
    first, second, *ends = [[int(token) for token in generator.integers(3, 131, size=n)] for n in (270, 60, 3, 9, 30)]
    return [[*first, *end] for end in ends] + [[*first, *second, *end] for end in ends]


@pytest.mark.parametrize("name", ["float32", "float16", "int8"])
def test_requests_that_begin_alike_get_the_same_bits(wide_folder: Path, name: str) -> None:
    expected = numbers(wide_folder, {**FORMATS[name], **ALONE}, [[prompt] for prompt in alike()])
    count = len(alike())
    options = {**FORMATS[name], "cpu_threads": 2, "speculative_config": "off", "enable_prefix_caching": True}
    found = numbers(wide_folder, options, [alike(), alike()])
    assert found == [*expected[:count], *expected[:count], *expected[count:], *expected[count:]]


def test_asking_for_the_prompts_logprobs_changes_nothing(wide_folder: Path) -> None:
    """All of the prompt's tokens pass the last layer then, else those that are sampled behind."""
    answers = []
    with LLM(str(wide_folder), **OPTIONS, dtype="float32") as llm:
        for wanted in (None, 0):
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=wanted)
            answers.append([result.outputs[0].logprobs for result in llm.generate(prompts(), params)])
    assert answers[0] == answers[1]
