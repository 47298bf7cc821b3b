"""The runner with Triton's attention and step kernels, in the interpreter, which must be chosen before triton is
imported: hence a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.config import make_engine_config
from octavo.errors import ConfigError
from octavo.worker.memory import make_plan

SCRIPT = """
import json, sys
from octavo import LLM, SamplingParams
prompts, options = json.loads(sys.argv[1])
with LLM(**options) as llm:
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
print(json.dumps([output.outputs[0].token_ids for output in outputs]))
"""


def test_triton_steps_give_transformers_tokens(folder: Path, greedy: Any) -> None:
    prompts = [[5, 6, 7, 8] * 5, [9, 10, 11], [12]]
    options = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "triton",
        "block_size": 16,
        "num_gpu_blocks_override": 60,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "overlap_depth": 2,
        "cpu_threads": 1,
        "use_tqdm": False,
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([prompts, options])],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [greedy(prompt, 6) for prompt in prompts]


def test_triton_without_a_device_is_refused(folder: Path) -> None:
    values = {"model": str(folder), "device": "cpu", "attention_backend": "triton"}
    with pytest.raises(ConfigError, match="--attention-backend triton needs a CUDA device"):
        make_plan(make_engine_config(values))
