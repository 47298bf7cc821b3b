"""Whole engines of families with sinks, chunks or latents against Transformers' greedy tokens: prompts batched and cut
into chunks, then found in the prefix cache. What a latent cache takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MLA, make_reference, save

from octavo import LLM, SamplingParams

PROMPTS = [[5 + (i * i) % 90 for i in range(count)] for count in (3, 50, 41, 17)]
NUM_NEW = 16


def greedy(reference: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_NEW):
        with torch.inference_mode():
            ids.append(int(reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("case", ["gpt-oss", "llama4", "deepseek-v2", "deepseek-v3", "glm4-moe", "falcon-new"])
def test_greedy_tokens(case: str, tmp_path: Path) -> None:
    reference = make_reference(case)
    expected = [greedy(reference, prompt) for prompt in PROMPTS]
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, detokenize=False)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "runner": "torch", "block_size": 4}
    limits = {"num_gpu_blocks_override": 200, "max_num_batched_tokens": 24, "max_num_seqs": 6, "cpu_threads": 1}
    with LLM(str(save(reference, tmp_path)), **options, **limits) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.stats()["prefix_hit_tokens"] >= 80
        if case.startswith("deepseek"):
            kept = MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"]
            assert llm._loop.runner.plan.kv_token_bytes == 3 * kept * 4
