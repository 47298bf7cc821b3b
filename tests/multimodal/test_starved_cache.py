"""Images in a cache that is too small for what runs: chunks cut them, prefixes are found and evicted, sequences give
their blocks up and begin again, and every answer is that of an engine with room for one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from in_process import InThisProcess
from tiny_images import CASES, picture, saved

from octavo import LLM, SamplingParams
from octavo.multimodal import inputs

ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "block_size": 4}
NUM_PROMPTS, NUM_NEW = 20, 10
SIZES = ((60, 40), (60, 40), (40, 90), (28, 28))


def prompts_of(placeholder: str) -> list[Any]:
    """Texts with none, one or two of a few pictures, that begin alike."""
    rng, pictures = random.Random(3), [picture(seed, size) for seed, size in enumerate(SIZES)]
    found: list[Any] = []
    for _ in range(NUM_PROMPTS):
        shown = [rng.choice(pictures) for _ in range(rng.choice((0, 1, 1, 2)))]
        begin, end = rng.choice(("Look at this: ", "The same beginning, ")), rng.choice((" What?", " Why so?", "!"))
        text = begin + " and ".join([placeholder] * len(shown)) + end
        found.append({"prompt": text, "multi_modal_data": {"image": shown}} if shown else text)
    return found


@pytest.mark.parametrize(("name", "budget"), [("llava", 9), ("qwen2_vl", 16), ("gemma3", 16)])
def test_answers_are_those_of_an_engine_with_room(
    name: str, budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3's images can't be cut, and its layers with windows take more blocks as prompts go on: a sequence at an
    image takes them from others."""
    monkeypatch.setattr(inputs, "ImageProcessorClient", InThisProcess)
    model, _ = saved(name, tmp_path)
    bias = {int(model.config.image_token_id): -100.0}
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, logit_bias=bias)
    prompts = prompts_of(CASES[name].placeholder)
    with LLM(str(tmp_path), **ENGINE, enable_prefix_caching=False, max_num_seqs=1) as llm:
        outputs = [llm.generate(prompt, greedy)[0] for prompt in prompts]
    expected = [output.outputs[0].token_ids for output in outputs]
    longest = max(len(output.prompt_token_ids) for output in outputs) + NUM_NEW
    small = {"max_model_len": longest, "num_gpu_blocks_override": longest // 4 + 16, "max_num_seqs": 5}
    with LLM(str(tmp_path), **ENGINE, **small, max_num_batched_tokens=budget) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)] == expected
        stats = llm.stats()
        assert stats["num_preemptions"] > 0
        assert stats["prefix_hit_tokens"] > 0
        assert stats["num_free_blocks"] == stats["num_blocks"]
