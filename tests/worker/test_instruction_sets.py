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

from octavo import _core

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
