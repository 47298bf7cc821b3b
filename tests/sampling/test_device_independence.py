"""Sampling never asks the device for a value: it runs on meta tensors, which have none.

On CUDA a question would wait for the device. (CPU has a branch of its own in top-p, which does ask.)
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from sampler_driver import WireRow, sample

from octavo.sampling.base import SampledRows
from octavo.sampling.sampler import Sampler

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "temperature": 0.5},
    {"seed": 3, "top_p": 0.5, "logprobs": 4},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    {"temperature": 0.0, "bad_words_ids": [[1, 2], [3], list(range(20))], "min_tokens": 3, "eos_token_ids": [4]},
    {"seed": 4, "allowed_token_ids": [1, 2, 3], "logit_bias": {"2": 1.0}},
]


@pytest.mark.parametrize("chosen", [[0], [0, 1], list(range(len(PARAMS)))], ids=["greedy", "plain", "everything"])
def test_sampling_reads_nothing_back(chosen: list[int]) -> None:
    meta = torch.device("meta")
    sampler = Sampler(vocab_size=64, num_slots=8, device=meta)
    token_ids = np.arange(12, dtype="<i4").tobytes()
    sampler.admit(WireRow(slot, json.dumps(PARAMS[slot]).encode(), 0, token_ids, 9) for slot in chosen)
    count = len(chosen)
    slot_s = torch.empty(count, dtype=torch.int64, device=meta)
    rows = SampledRows(slot_s, torch.empty_like(slot_s), np.array(chosen, dtype=np.int32))
    for _ in range(2):
        sampled = sample(sampler, torch.empty(count, 64, device=meta), rows)
        assert (sampled.token_s.shape, sampled.token_s.dtype) == ((count,), torch.int64)
    if len(chosen) == len(PARAMS):
        assert sampled.logprobs is not None
        assert sampled.logprobs.value_sk.shape == (count, 5)


def test_the_instrument_notices_a_question() -> None:
    with pytest.raises(RuntimeError):
        int(torch.zeros(1, device="meta"))
