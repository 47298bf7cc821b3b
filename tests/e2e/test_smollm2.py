"""The whole engine on the real model: greedy tokens equal Transformers fp32, however the work is cut.

Transformers is run once over each prompt and Octavo's continuation. Where its argmax after every prefix is Octavo's
next token, its own greedy generation is that continuation, token by token; this costs 32 forward passes instead of
2048, and none for a continuation that another run had. Logprobs are compared too: raw log-softmax within 1e-3.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams

from .conftest import MODEL, NUM_NEW

pytestmark = pytest.mark.timeout(900)

# name -> options: each cuts the same work differently.
RUNS: dict[str, dict[str, Any]] = {
    "batched": {"max_num_seqs": 32, "max_num_batched_tokens": 2048},
    "chunked": {"max_num_seqs": 32, "max_num_batched_tokens": 96, "enable_prefix_caching": False},
    "preempted": {"max_num_seqs": 32, "num_gpu_blocks_override": 120, "max_model_len": 768},
    "depth-2": {"max_num_seqs": 16, "overlap_depth": 2, "block_size": 32},
}


def greedy(options: dict[str, Any], prompt_token_ids: list[list[int]], **params: Any) -> tuple[Any, dict[str, int]]:
    with LLM(MODEL, dtype="float32", device="cpu", **options) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, **params)
        outputs = llm.generate(prompt_token_ids, sampling, use_tqdm=False)
        stats = llm.stats()
        again = llm.generate(prompt_token_ids[:4], sampling, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs[:4]]
    assert stats["num_free_blocks"] == stats["num_blocks"]
    return outputs, stats


class Reference:
    """Asks the reference model once for each continuation."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], bool] = {}

    def continues(self, prompt: list[int], tokens: list[int]) -> bool:
        """Whether `tokens` are what its greedy generation appends to `prompt`."""
        asked = (len(prompt), *prompt, *tokens)
        if asked not in self._known:
            with torch.inference_mode():
                logits = self._model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits[0]
            self._known[asked] = bool((logits.argmax(-1) == torch.tensor(tokens)).all())
        return self._known[asked]


@pytest.fixture(scope="module")
def reference(reference_model: Any) -> Reference:
    return Reference(reference_model)


@pytest.mark.parametrize("name", RUNS)
def test_greedy_tokens_equal_transformers(name: str, prompt_token_ids: list[list[int]], reference: Reference) -> None:
    outputs, stats = greedy(RUNS[name], prompt_token_ids)
    tokens = [o.outputs[0].token_ids for o in outputs]
    assert all(len(t) == NUM_NEW for t in tokens)
    wrong = [i for i, prompt in enumerate(prompt_token_ids) if not reference.continues(prompt, tokens[i])]
    assert not wrong
    if name == "preempted":
        assert stats["num_preemptions"] > 0
    if name == "batched":
        assert stats["prefix_hit_tokens"] > 0


def test_logprobs_are_those_of_transformers(reference_model: Any, prompt_token_ids: list[list[int]]) -> None:
    ids = prompt_token_ids[:4]
    outputs, _ = greedy({"max_num_batched_tokens": 128}, ids, logprobs=5, prompt_logprobs=0)
    for prompt, output in zip(ids, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = reference_model(torch.tensor([prompt + tokens])).logits[0]
        expected = logits.log_softmax(-1)
        assert output.outputs[0].logprobs is not None
        for i, (token, entries) in enumerate(zip(tokens, output.outputs[0].logprobs, strict=True)):
            row = expected[len(prompt) - 1 + i]
            for token_id, entry in entries.items():
                assert abs(entry.logprob - row[token_id].item()) < 1e-3
            assert entries[token].rank == 1
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for i, entries in enumerate(output.prompt_logprobs[1:], start=1):
            assert entries is not None
            assert abs(entries[prompt[i]].logprob - expected[i - 1, prompt[i]].item()) < 1e-3
