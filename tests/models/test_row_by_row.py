"""Models that run row by row, in the whole engine: prefix hits, forks, preemption and cut prompts come out right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent / "architectures"))

from tiny import make_model, tiny_config

from octavo import LLM, SamplingParams

NUM_NEW = 6
CASES = {"mamba": "MambaForCausalLM", "bloom": "BloomForCausalLM", "openai-gpt": "OpenAIGPTLMHeadModel"}
"""A recurrence, a bias of the scores, and a model without any cache."""


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model_class = getattr(transformers, CASES[request.param])
    reference = make_model(model_class, tiny_config(transformers.CONFIG_MAPPING[request.param], model_class))
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return reference, folder


def greedy(reference: Any, token_ids: list[int]) -> list[int]:
    """Transformers' tokens, each from the whole sequence."""
    sequence = list(token_ids)
    with torch.inference_mode():
        for _ in range(NUM_NEW):
            logits = reference(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, -1]
            sequence.append(int(logits.argmax()))
    return sequence[len(token_ids) :]


def test_many_at_once_with_a_shared_prefix_and_few_blocks(model: tuple[Any, Path]) -> None:
    reference, folder = model
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 100, (12,), generator=generator).tolist()
    prompts = [shared + torch.randint(3, 100, (length,), generator=generator).tolist() for length in (5, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, n=2)
    with LLM(
        str(folder),
        block_size=4,
        num_gpu_blocks_override=14,
        max_num_batched_tokens=10,
        max_model_len=48,
        dtype="float32",
    ) as llm:
        for _ in range(2):  # the second time from cached prefixes
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert [choice.token_ids for choice in output.outputs] == [greedy(reference, prompt)] * 2
        assert llm.stats()["num_preemptions"] > 0
