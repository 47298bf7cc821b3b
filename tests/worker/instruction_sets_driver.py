"""Run a checkpoint with chosen instructions and print what came out: arguments FOLDER INSTRUCTIONS QUANTIZATION.

A process of its own, since a process keeps what it chose.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from octavo import LLM, SamplingParams
from octavo._core import cpu_restrict

PROMPTS = [[5, 9, 17, 23, 4], list(range(20, 70)), [99] * 9]


def main(folder: str, instructions: str, quantization: str) -> None:
    cpu_restrict(instructions)
    options: dict[str, Any] = {
        "block_size": 4,
        "num_gpu_blocks_override": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "speculative_config": "off",
    }
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, prompt_logprobs=1, detokenize=False)
    with LLM(folder, runner="embedded", dtype="float32", quantization=quantization, cpu_threads=2, **options) as llm:
        results = llm.generate(PROMPTS, params)
    assert "torch" not in sys.modules
    found = [
        {
            "tokens": list(result.outputs[0].token_ids),
            "logprobs": [
                logprob.logprob
                for position in [*(result.prompt_logprobs or ())[1:], *(result.outputs[0].logprobs or ())]
                for logprob in position.values()
            ],
        }
        for result in results
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
