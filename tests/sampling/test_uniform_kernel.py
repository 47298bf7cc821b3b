"""The Triton generator gives the reference's numbers to the bit (in the interpreter), and compiles for an H200."""

from __future__ import annotations

import subprocess
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo import envs
from octavo.kernels.triton.uniform import uniform_kernel

COMPARE = """
import torch
from octavo.kernels.reference import uniform as reference
from octavo.kernels.triton import uniform as kernel
generator = torch.Generator().manual_seed(int(torch.seed()) % 2**31)
for num_rows in (0, 1, 5, 128, 300):
    seeds = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
    index = torch.randint(0, 128, (40,), generator=generator)
    slots = torch.randint(0, 40, (num_rows,), generator=generator)
    position = torch.randint(0, 2**31 - 1, (num_rows,), generator=generator)
    arguments = (seeds, index, slots, position, {0: 3, 1: 1, 5: 700, 128: 256, 300: 9}[num_rows])
    assert kernel.uniform(*arguments).equal(reference.uniform(*arguments)), (num_rows, generator.initial_seed())
print("same")
"""


def test_numbers_are_the_references() -> None:
    command = [sys.executable, "-W", "ignore", "-c", COMPARE]
    done = subprocess.run(command, env=envs.child(TRITON_INTERPRET="1"), capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "same", done.stderr


def test_it_compiles_for_sm_90() -> None:
    pointers = {"seed_ptr": "*i64", "index_ptr": "*i64", "slot_ptr": "*i64", "position_ptr": "*i64", "out_ptr": "*fp64"}
    source = ASTSource(uniform_kernel, {**pointers, "num_columns": "i32", "COLUMNS": "constexpr"}, {"COLUMNS": 256})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "mul.hi.u32" in compiled.asm["ptx"] or "mul.wide.u32" in compiled.asm["ptx"]
