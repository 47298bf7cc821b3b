"""Compiles a `Launch` for sm_90 without a GPU and reports what came out of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from pipelines import depths
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton.launch import Launch

TARGET = GPUTarget("cuda", 90, 32)
DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Compiled:
    """What the assembler and the PTX say of a kernel."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_wgmma: int
    num_mma: int
    num_tma_loads: int
    loads_before_wait: int
    """Tensor memory loads that stand before the wait for the kernel before it."""
    depths: tuple[int, ...]
    """See pipelines.py."""


def _type(name: str, value: Any) -> str:
    if isinstance(value, GluonDescriptor):
        return f"tensordesc<{DTYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>".replace(" ", "", 1)
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{DTYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        return f"*{DTYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i64" if abs(value) >= 1 << 31 else "i32"


def source_of(launch: Launch, *, pdl: bool) -> ASTSource:
    """What `Launch.run` would have compiled, for aligned tensors."""
    names = list(launch.kernel.arg_names)
    constants = {**launch.constants, "PDL": pdl}
    assert set(names) == set(constants) | set(launch.args), "a launch names every parameter of its kernel"
    signature = {n: "constexpr" if n in constants else _type(n, launch.args[n]) for n in names}
    aligned = [n for n in names if signature[n].startswith("*")]
    free = {names[p] if isinstance(p, int) else p for p in launch.kernel.do_not_specialize or ()}
    aligned += [n for n in names if isinstance(launch.args.get(n), int) and n not in free and launch.args[n] % 16 == 0]
    source_class = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    return source_class(
        launch.kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )


def compile_launch(launch: Launch) -> Compiled:
    """Build it as `Launch.run` would on an H200, dependent launch included."""
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    kernel = triton.compile(source_of(launch, pdl=True), target=TARGET, options=options)
    ptx: str = kernel.asm["ptx"]
    log = _assemble(ptx)
    wait = ptx.find("griddepcontrol.wait")
    assert wait >= 0, "every kernel waits for the one before it"
    return Compiled(
        registers=int(re.findall(r"Used (\d+) registers", log)[0]),
        spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        shared_bytes=kernel.metadata.shared,
        num_wgmma=ptx.count("wgmma.mma_async"),
        num_mma=ptx.count("mma.sync"),
        num_tma_loads=ptx.count("cp.async.bulk.tensor"),
        loads_before_wait=ptx[:wait].count("cp.async.bulk.tensor"),
        depths=depths(kernel.asm["ttgir"]),
    )


def spill_bytes(ptx: str, capability: int) -> int:
    """Of registers that go to memory, on a device of this compute capability (times ten)."""
    return sum(map(int, re.findall(r"(\d+) bytes spill", _assemble(ptx, capability))))


def _assemble(ptx: str, capability: int = 90) -> str:
    """The assembler's statistics."""
    arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"-arch={arch}", source, "-o", Path(folder) / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr
