"""Every kernel on small shapes under compute-sanitizer: invalid and uninitialised accesses, races in shared memory.

    PYTHONPATH=python python tests/kernels/gpu_sanitize.py --out sanitize.json [--tools memcheck,racecheck]

An engine runs tiny random models (dense with and without head norms, a mixture of experts, fp8, deterministic), with
prompts in chunks, decode steps of 1 to 20 rows, sampling with and without top-k and top-p, penalties, with and without
CUDA graphs: each kind of kernel is launched by its own host code. The first run, without the tool, compiles everything.
compute-sanitizer comes with the CUDA toolkit. The exit code is 1 if a tool found something; `tests/run` does not run
this.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
LLAMA = TINY | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN3 = TINY | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MIXTURE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (LLAMA, {}),
    "eager": (LLAMA, {"enforce_eager": True}),
    "head norms": (QWEN3, {}),
    "experts": (MIXTURE, {}),
    "fp8": (LLAMA, {"quantization": "fp8"}),
    "deterministic": (LLAMA, {"deterministic": True}),
    "plain": (LLAMA, {"decode_kernels": "plain"}),
}
TOOL_OPTIONS = {
    "memcheck": [],
    "racecheck": ["--racecheck-report", "analysis"],
    "initcheck": [],
    "synccheck": [],
}
FOUND = 7
"""The exit code that the tool is asked for when it finds something."""


def run_cases(names: list[str]) -> None:
    """In this process: an engine a case."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benches"))
    import offline

    from octavo import LLM, SamplingParams

    rng = random.Random(0)
    for name in names:
        shape, options = CASES[name]
        offline.SHAPES["tiny"] = shape
        with tempfile.TemporaryDirectory() as folder:
            offline.write_shape("tiny", Path(folder))
            limits = {
                "max_num_seqs": 20,
                "max_num_batched_tokens": 96,
                "max_model_len": 512,
                "num_gpu_blocks_override": 200,
            }
            begun = time.perf_counter()
            with LLM(model=folder, load_format="dummy", **limits, **options) as llm:
                for count, longest in ((1, 3), (3, 130), (20, 150)):
                    prompts = [[rng.randrange(2, 500) for _ in range(rng.randrange(1, longest))] for _ in range(count)]
                    kinds = [
                        {"temperature": 0.0},
                        {"temperature": 0.8},
                        {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
                        {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 3},
                    ]
                    params = [SamplingParams(max_tokens=4, ignore_eos=True, **kinds[i % 4]) for i in range(count)]
                    llm.generate(prompts, params)
            print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)


def sanitizer() -> str | None:
    """Where the tool is."""
    return shutil.which("compute-sanitizer") or next(
        (str(path) for path in Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None
    )


def run_tool(tool: str, path: str, cases: list[str], timeout_s: float) -> dict[str, Any]:
    """All cases in one process under the tool."""
    begun = time.perf_counter()
    command = [path, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *TOOL_OPTIONS[tool]]
    command += [sys.executable, __file__, "--child", ",".join(cases)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        out, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as gone:
        out, code = (gone.stdout or b"").decode() + "\ntimeout", 124
    lines = [line for line in out.splitlines() if line.startswith("=========") or "Error" in line]
    ended = [line for line in out.splitlines() if line.endswith(" s") and ": " in line]
    return {"tool": tool, "code": code, "s": time.perf_counter() - begun, "cases": ended, "lines": lines[:60]}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--timeout", type=float, default=110.0, help="seconds a tool")
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        run_cases(args.child.split(","))
        return 0
    cases = args.cases.split(",")
    begun = time.perf_counter()
    subprocess.run([sys.executable, __file__, "--child", ",".join(cases)], check=True)
    print(f"[{time.perf_counter() - begun:.0f} s] without a tool", flush=True)
    path = sanitizer()
    if path is None:
        print("no compute-sanitizer here: it comes with the CUDA toolkit")
        return 1
    results = [run_tool(tool, path, cases, args.timeout) for tool in args.tools.split(",")]
    for result in results:
        print(f"{result['tool']}: exit {result['code']} after {result['s']:.0f} s; cases: {result['cases']}")
        print("\n".join(f"    {line}" for line in result["lines"][:25]))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    return 1 if any(result["code"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
