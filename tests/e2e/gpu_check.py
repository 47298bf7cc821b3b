"""Checks the whole engine on a CUDA device with the real model in bf16; run by hand, exits 1 on a failure.

    python tests/e2e/gpu_check.py MODEL.gguf --out check.json [--only-kl]

Depth 1 and 2 must give equal tokens. Eager steps, chunks and preemption run kernels of other shapes, so there the
agreement is reported. KL is that of the next-token distribution to Transformers in fp32, over prompts and over
generated text, in bf16 and with weights rounded to fp8.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams

NUM_NEW = 64
RUNS: dict[str, dict[str, Any]] = {
    "depth 2": {"overlap_depth": 2},
    "depth 1": {"overlap_depth": 1},
    "eager": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 128, "enable_prefix_caching": False},
    "preempted": {"num_gpu_blocks_override": 40, "max_model_len": 1024, "max_num_seqs": 32},
}
KL_BOUNDS: dict[str, tuple[dict[str, Any], float]] = {
    "bf16": ({}, 0.01),
    "fp8": ({"quantization": "fp8"}, 0.02),
}
TEXTS = [
    "Explain the tides to a child.",
    "List three facts about copper:\n1.",
    "def fibonacci(n):\n    ",
    "In 1969, 3 men flew to the moon. ",
    "You are a careful assistant. Answer in plain words. " * 12 + "Why is salt useful?",
]


def prompts_of(llm: LLM) -> list[list[int]]:
    assert llm.tokenizer is not None
    texts = [f"{text} ({i})" for i in range(7) for text in TEXTS][:32]
    return llm.tokenizer.encode_batch(texts)


def generate(model: str, options: dict[str, Any], **params: Any) -> tuple[list[Any], float, float]:
    """Outputs, seconds to ready, seconds of the second (warm) run."""
    start = time.perf_counter()
    with LLM(model, dtype="bfloat16", device="cuda", **options) as llm:
        ready = time.perf_counter() - start
        prompts = prompts_of(llm)
        sampling = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, **params)
        llm.generate(prompts, sampling, use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        stats = llm.stats()
        assert stats["num_free_blocks"] == stats["num_blocks"], "blocks leaked"
        if "num_gpu_blocks_override" in options:
            assert stats["num_preemptions"] > 0, "the cache was not small enough to preempt"
    return outputs, ready, seconds


def coarse_kl(reference_v: torch.Tensor, entries: dict[int, Any]) -> float:
    """KL(fp32 || octavo) over octavo's listed tokens and the rest as one bucket: a tight lower bound."""
    ids = torch.tensor(list(entries), device=reference_v.device)
    p = reference_v[ids].double().exp()
    q = torch.tensor([e.logprob for e in entries.values()], device=p.device, dtype=torch.float64).exp()
    p = torch.cat([p, (1 - p.sum()).clamp_min(1e-12)[None]])
    q = torch.cat([q, (1 - q.sum()).clamp_min(1e-12)[None]])
    return float((p * (p.log() - q.log())).sum())


def reference_kl(gguf: Path, outputs: list[Any]) -> dict[str, float]:
    """Mean KL over prompts' and outputs' positions, and the share of greedy tokens that fp32 would choose too."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).cuda().eval()
    prompt_kl, output_kl, agree = [], [], []
    for output in outputs[:12]:
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0]
        expected = logits.log_softmax(-1)
        prompt_kl += [coarse_kl(expected[i], entries) for i, entries in enumerate(output.prompt_logprobs[1:])]
        for i, entries in enumerate(output.outputs[0].logprobs):
            row = expected[len(prompt) - 1 + i]
            output_kl.append(coarse_kl(row, entries))
            agree.append(float(row.argmax() == tokens[i]))
    mean = {"prompt_kl": prompt_kl, "output_kl": output_kl, "greedy_agreement": agree}
    return {name: sum(values) / len(values) for name, values in mean.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--out", type=Path, default=Path("check.json"))
    parser.add_argument("--only-kl", action="store_true", help="leave the runs out")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    model = str(args.gguf)
    failures: list[str] = []
    report: dict[str, Any] = {}
    tokens: dict[str, list[list[int]]] = {}
    for name, options in () if args.only_kl else RUNS.items():
        try:
            outputs, ready, seconds = generate(model, options)
        except Exception as error:
            failures.append(f"{name}: {error!r}")
            print(f"{name}: {error!r}", flush=True)
            continue
        tokens[name] = [o.outputs[0].token_ids for o in outputs]
        same = sum(a == b for a, b in zip(tokens[name], tokens.get("depth 2", tokens[name]), strict=True))
        report[name] = {"ready_s": ready, "tokens_per_s": 32 * NUM_NEW / seconds, "same_as_depth_2": same}
        print(name, report[name], flush=True)
    if tokens.get("depth 1") != tokens.get("depth 2"):
        failures.append("depth 1 and depth 2 gave different tokens")
    for name, (options, bound) in KL_BOUNDS.items():
        outputs, _, _ = generate(model, options, logprobs=20, prompt_logprobs=20)
        found = report[f"{name} to fp32"] = reference_kl(args.gguf, outputs)
        print(name, found, flush=True)
        too_far = {kind: kl for kind, kl in found.items() if kind.endswith("_kl") and kl > bound}
        failures += [f"{name}: {kind} {kl:.4f} is above {bound}" for kind, kl in too_far.items()]
    report["failures"] = failures
    args.out.write_text(json.dumps(report, indent=1))
    print("FAILED: " + "; ".join(failures) if failures else "all passed")
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
