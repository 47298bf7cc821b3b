"""Is what is measured also right? A two-layer model of a known shape, run as it will be measured and by the reference
path (eager, plain PyTorch attention and sampling), from the same random weights.

Every greedy token of the first must be the second's own choice, wherever that one's first token leads by `MARGIN`;
elsewhere bf16 rounding may decide. The reference reads prompt and tokens in one pass (prompt logprobs).
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from shapes import SHAPES, write_shape

NUM_LAYERS = 2
NUM_OUT = 16
LENGTHS = (1, 7, 63, 64, 65, 200, 300)
ROUNDS = (1, 6, 20)
"""Batches of so many requests at once: kernels differ by the number of rows."""
STEP = 512
"""Tokens of a step, so that prompts come in chunks beside others that decode."""
MARGIN = 0.1
"""Logprob by which a first token must lead: bf16 rounds the logits (of size 5) of random models by less."""
WIDE_MARGIN = 0.4
"""With 8-bit activations, which some kernels keep wide, and with experts, which are chosen by a hair."""
SMALL = {
    "runner": "torch",
    "load_format": "dummy",
    "max_model_len": 512,
    "kv_cache_memory_bytes": 1 << 30,
    "max_num_batched_tokens": STEP,
    "prompt_graph_tokens": STEP,
    "fp8_wide_attention": [0, 0],
    "fp8_wide_mlp": [0, 0],
}
REFERENCE = {"attention_backend": "reference", "decode_kernels": "plain", "enforce_eager": True, "overlap_depth": 1}


def check(shape: str, engine_options: dict[str, Any]) -> str:
    """A line about the agreement. SystemExit when the tokens differ where they must not."""
    from octavo import LLM, SamplingParams

    rng = random.Random(7)
    with tempfile.TemporaryDirectory(prefix="octavo-check-") as folder:
        write_shape(shape, Path(folder), NUM_LAYERS)
        small = {**engine_options, **SMALL}
        params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
        texts: list[tuple[list[int], list[int]]] = []
        with LLM(folder, **small) as llm:
            for _ in llm._loop.runner.chores:  # graphs are captured, so that they run
                pass
            for number in ROUNDS:
                prompts = [[rng.randint(100, 10000) for _ in range(rng.choice(LENGTHS))] for _ in range(number)]
                outputs = llm.generate(prompts, params, use_tqdm=False)
                texts += [(p, o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
        scoring = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
        with LLM(folder, **small | REFERENCE) as llm:
            scored = llm.generate([prompt + tokens for prompt, tokens in texts], scoring, use_tqdm=False)
    is_loose = "quantization" in engine_options or "num_experts" in SHAPES[shape]
    margin = WIDE_MARGIN if is_loose else MARGIN
    lost, wrong = 0, 0
    for (prompt, tokens), output in zip(texts, scored, strict=True):
        assert output.prompt_logprobs is not None, "they were asked for"
        for token, entries in zip(tokens, output.prompt_logprobs[len(prompt) :], strict=True):
            assert entries is not None, "only the first token has none"
            lead = max(entry.logprob for entry in entries.values()) - entries[token].logprob
            lost += lead > 0
            wrong += lead > margin
    total = NUM_OUT * len(texts)
    if wrong:
        raise SystemExit(f"{wrong} of {total} tokens are not the reference's, where it is sure")
    return f"{total} tokens checked against the reference; {lost} near ties went the other way"
