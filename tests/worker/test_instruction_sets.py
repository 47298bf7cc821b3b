"""The whole engine on machines with fewer instructions: each set that runs here is chosen in turn, down to none, and
gives what the others give. And the extension has such instructions only in functions that are chosen so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from octavo import LLM, SamplingParams, _core

DRIVER = "tests.worker.instruction_sets_driver"
ROOT = Path(__file__).resolve().parents[2]
# Who else compiles functions for instructions, and looks before calling them.
GUARDED = re.compile(r"octavo_cpu.*kernel|core_arch|memchr.*avx2|aho_corasick.*AVX2|rand_chacha.*avx")


def run(folder: Path, instructions: str, quantization: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", DRIVER, str(folder), instructions, quantization]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("quantization", "tolerance"), [("none", 2e-4), ("int8", 2e-2), ("int4", 2e-2)])
def test_every_instruction_set_gives_the_same(folder: Path, quantization: str, tolerance: float) -> None:
    """But for last bits, which decide here and there how an int8 activation is rounded."""
    best, *others = _core.cpu_features()
    want = run(folder, best, quantization)
    assert all(len(result["tokens"]) == 12 for result in want)
    for instructions in others:
        found = run(folder, instructions, quantization)
        assert [result["tokens"] for result in found] == [result["tokens"] for result in want], instructions
        for ours, theirs in zip(found, want, strict=True):
            np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=tolerance, err_msg=instructions)


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights enough for two threads to share one token's step (9.4 million)."""
    config = transformers.LlamaConfig(
        vocab_size=131,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("large")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_threads_change_nothing(large_folder: Path, quantization: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1, detokenize=False, ignore_eos=True)
    found = []
    for threads in (1, 2, 3):
        options: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 128, "cpu_threads": threads}
        with LLM(str(large_folder), runner="embedded", dtype="float32", quantization=quantization, **options) as llm:
            results = llm.generate([[5, 9, 17], list(range(20, 90))], params)
        outputs = [result.outputs[0] for result in results]
        found.append([(o.token_ids, [next(iter(p.values())).logprob for p in o.logprobs or ()]) for o in outputs])
    assert len(found[0][0][1]) == 24
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_instructions_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match='the instructions "sse9" are not'):
        _core.cpu_restrict("sse9")


@pytest.mark.skipif("avx2" not in _core.cpu_features(), reason="disassembles x86-64")
def test_vector_instructions_stay_in_functions_that_are_chosen_at_run_time() -> None:
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(_core.__file__)], capture_output=True, text=True, check=True
    ).stdout
    functions: set[str] = set()
    name = ""
    for line in text.splitlines():
        if line.endswith(">:"):
            name = line.split("<", 1)[1]
        elif re.search(r"\tv[a-z]", line):  # AVX and later: every mnemonic begins so
            functions.add(name)
    assert any("octavo_cpu" in function for function in functions)
    assert [function for function in sorted(functions) if not GUARDED.search(function)] == []
