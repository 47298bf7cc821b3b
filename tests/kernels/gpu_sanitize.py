"""Every kernel on small shapes under compute-sanitizer: invalid and uninitialised accesses, races in shared memory.

    PYTHONPATH=python python tests/kernels/gpu_sanitize.py --out sanitize.json                     # all, memcheck
    PYTHONPATH=python python tests/kernels/gpu_sanitize.py --tools racecheck --cases dense,experts --budget 100

An engine runs tiny random models (dense with and without head norms, a mixture of experts, fp8, deterministic), with
prompts in chunks, decode steps of 1 to 20 rows, sampling with and without top-k and top-p, penalties, with and without
CUDA graphs: each kind of kernel is launched by its own host code. A case is a process of its own under a tool, with a
time limit of its own, and what it prints is shown at once; before, the same without a tool compiles everything.
racecheck, a hundred times slower, runs fewer rows and looks at Octavo's own kernels (or some of them: `--kernels`).
compute-sanitizer comes with the CUDA toolkit. The exit code is 1 if a tool found something or a case did not end;
`tests/run` does not run this.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
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
GPT_OSS = TINY | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 320,
    "intermediate_size": 320,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
GLM = TINY | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
NEMOTRON = TINY | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*E",
    "hidden_act": "relu2",
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
}
SQUARES = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (LLAMA, {}),
    "eager": (LLAMA, {"enforce_eager": True}),
    "head norms": (QWEN3, {}),
    "experts": (MIXTURE, {}),
    "gpt-oss": (GPT_OSS, {}),
    "groups of experts": (GLM, {}),
    "experts without gates": (NEMOTRON, {}),
    "fp8": (LLAMA, {"quantization": "fp8", "fp8_wide_attention": [0, 0], "fp8_wide_mlp": [1, 0]}),
    "squares": (LLAMA | SQUARES, {}),
    "plain squares": (LLAMA | SQUARES, {"decode_kernels": "plain"}),
    "deterministic": (LLAMA, {"deterministic": True}),
    "plain": (LLAMA, {"decode_kernels": "plain"}),
}
SOURCES = Path(__file__).parents[2] / "kernels" / "triton"
OWN = sorted(
    {
        name
        for file in SOURCES.glob("*.py")
        for name in re.findall(r"\ndef ([a-z]\w*_kernel|gemv|[a-z]\w*_gemm)\(", file.read_text())
    }
)
"""Names of Octavo's kernels. (racecheck fails itself in kernels of cuBLAS on Hopper: an illegal access that memcheck
does not see.)"""
TOOL_OPTIONS = {
    "memcheck": [],
    "racecheck": ["--racecheck-report", "analysis"],
    "initcheck": [],
    "synccheck": [],
}
BATCHES = {
    "all": ((1, 3, 4), (3, 130, 4), (20, 150, 4)),
    "few": ((1, 3, 3), (5, 70, 2)),
}
"""(requests, longest prompt, tokens each) of the calls that a case makes."""
FEW = ("racecheck",)
"""Tools that are so slow that they get "few"."""
FOUND = 7
"""The exit code that the tool is asked for when it finds something."""
OUT_OF_TIME = 124
LEAST_S = 10.0


def run_cases(names: list[str], batches: str) -> None:
    """In this process: an engine a case."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benches"))
    from shapes import SHAPES, write_shape

    from octavo import LLM, SamplingParams

    rng = random.Random(0)
    for name in names:
        shape, options = CASES[name]
        SHAPES["tiny"] = shape
        with tempfile.TemporaryDirectory() as folder:
            write_shape("tiny", Path(folder))
            limits = {
                "max_num_seqs": 20,
                "max_num_batched_tokens": 96,
                "max_model_len": 512,
                "num_gpu_blocks_override": 200,
            }
            begun = time.perf_counter()
            with LLM(model=folder, load_format="dummy", **limits, **options) as llm:
                print(f"{name}: loaded after {time.perf_counter() - begun:.1f} s", flush=True)
                for count, longest, num_out in BATCHES[batches]:
                    prompts = [[rng.randrange(2, 500) for _ in range(rng.randrange(1, longest))] for _ in range(count)]
                    kinds = [
                        {"temperature": 0.0},
                        {"temperature": 0.8},
                        {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
                        {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 3},
                    ]
                    params = [SamplingParams(max_tokens=num_out, ignore_eos=True, **kinds[i % 4]) for i in range(count)]
                    llm.generate(prompts, params, use_tqdm=False)
                    print(f"{name}: {count} requests after {time.perf_counter() - begun:.1f} s", flush=True)


def sanitizer() -> str | None:
    """Where the tool is."""
    return shutil.which("compute-sanitizer") or next(
        (str(path) for path in Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None
    )


def run_case(tool: str, path: str, case: str, limit_s: float, kernels: list[str]) -> dict[str, Any]:
    """One case in a process of its own under the tool, which is killed after `limit_s`; its lines are shown as they
    come."""
    begun = time.perf_counter()
    command = [path, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *TOOL_OPTIONS[tool]]
    if tool in FEW:
        command += ["--kernel-name", ",".join(f"kns={name}" for name in kernels)]
    command += [sys.executable, "-u", __file__, "--child", case, "--batches", "few" if tool in FEW else "all"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    out_of_time = threading.Event()

    def kill() -> None:
        out_of_time.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, kill)
    timer.start()
    lines = []
    assert process.stdout is not None, "it is a pipe"
    for line in process.stdout:
        if line.startswith(("=========", case)) or "Error" in line:
            lines.append(line.rstrip())
            print(f"    [{time.perf_counter() - begun:.0f} s] {lines[-1]}", flush=True)
    code = process.wait()
    timer.cancel()
    if out_of_time.is_set():
        code = OUT_OF_TIME
    return {"tool": tool, "case": case, "code": code, "s": time.perf_counter() - begun, "lines": lines[:60]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tools", default="memcheck", help="of memcheck, racecheck, initcheck, synccheck")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--kernels", default=",".join(OWN), help="for racecheck: (parts of) names of kernels to check")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds a case under a tool")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds in all; cases past it are left out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--batches", default="all", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_cases(args.child.split(","), args.batches)
        return 0
    cases = args.cases.split(",")
    deadline = time.perf_counter() + args.budget
    path = sanitizer()
    if path is None:
        print("no compute-sanitizer here: it comes with the CUDA toolkit")
        return 1
    subprocess.run([sys.executable, __file__, "--child", ",".join(cases)], check=True)
    results = []
    for tool in args.tools.split(","):
        for case in cases:
            left_s = deadline - time.perf_counter()
            if left_s < LEAST_S:
                print(f"{tool} of {case}: left out, no time", flush=True)
                continue
            print(f"{tool} of {case}", flush=True)
            results.append(run_case(tool, path, case, min(args.limit, left_s), args.kernels.split(",")))
            end = {0: "nothing found", OUT_OF_TIME: "out of time"}.get(results[-1]["code"], "FOUND SOMETHING")
            print(f"{tool} of {case}: {end} after {results[-1]['s']:.0f} s", flush=True)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1))
    return 1 if any(result["code"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
