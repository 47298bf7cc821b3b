"""Tiny image-text models on a GPU against Transformers in fp32 on the CPU: log probabilities of prompts with pictures,
and decode steps from CUDA graphs against eager ones.

    PYTHONPATH=python python tests/multimodal/gpu_images.py [--only qwen3_vl,llava] [--device cpu]

`tests/run` does not run this file (no test_ prefix). Exit code 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from in_process import InThisProcess
from tiny_images import CASES, picture, saved

from octavo import LLM, SamplingParams
from octavo.multimodal import inputs

DEFAULT = ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3", "internvl")
BOUND = 0.15
"""Mean difference of bf16's log probabilities from fp32's."""


def expected(model: Any, processor: Any, text: str, pictures: list[Any]) -> torch.Tensor:
    """Log probabilities of each prompt token but the first."""
    given = processor(text=[text], images=pictures, return_tensors="pt")
    with torch.inference_mode():
        logits = model(**given, use_cache=False).logits[0]
    chosen = given["input_ids"][0, 1:, None]
    return logits.float().log_softmax(-1)[:-1].gather(1, chosen)[:, 0]


def check(name: str, device: str) -> str:
    """What is wrong; "" when nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        model, processor = saved(name, Path(folder))
        image = CASES[name].placeholder
        text, pictures = f"What is {image} this, and {image}?", [picture(1), picture(2, (40, 90))]
        reference = expected(model, processor, text, pictures)
        prompt = {"prompt": text, "multi_modal_data": {"image": pictures}}
        bias = {int(model.config.image_token_id): -100.0}
        tokens = []
        for eager in (True, False):
            options: dict[str, Any] = {"enforce_eager": eager, "max_num_seqs": 4, "gpu_memory_utilization": 0.2}
            with LLM(folder, dtype="bfloat16", device=device, **options) as llm:
                greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logit_bias=bias)
                tokens.append(llm.generate([prompt, "text alone"], greedy))
                assert llm.reset_prefix_cache()
                scored = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
        assert scored is not None
        found = torch.tensor([next(iter(entry.values())).logprob for entry in scored[1:] if entry])
        error = (found - reference).abs().mean().item()
        same = [[o.outputs[0].token_ids for o in outputs] for outputs in tokens]
        print(f"{name:16} mean error {error:.4f}, graphs {'equal' if same[0] == same[1] else 'DIFFER'}", flush=True)
        if error > BOUND:
            return f"log probabilities are off by {error:.3f}"
        return "" if same[0] == same[1] else "graphs give other tokens"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", default=",".join(DEFAULT))
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    inputs.ImageProcessorClient = InThisProcess  # type: ignore[assignment,misc]
    problems = []
    for name in arguments.only.split(","):
        try:
            problem = check(name, arguments.device)
        except Exception:  # the others are tried, too
            problem = traceback.format_exc()
        if problem:
            problems.append(f"{name}: {problem}")
    print("\n".join(problems) or "none failed")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
