"""Compiles Triton kernels for an H200 (sm_90) without one, and reads what came out: registers, spills, shared memory.

Launches are recorded, not run: `record` makes a kernel note its arguments, so that what is compiled is what the host
code would launch, with its configurations.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from pipelines import depths
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

SHARED_LIMIT = 227 * 1024
OPTIONS = ("num_warps", "num_stages")
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Compiled:
    """Resources of one kernel."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: int
    mma: int
    async_copies: int
    wide_loads: int
    """Of 16 bytes a thread."""
    depths: tuple[int, ...]
    """See pipelines.py."""


class Recorder:
    """Stands in for a JITFunction on the host: keeps launches."""

    def __init__(self, kernel: JITFunction[Any], launches: list[tuple[JITFunction[Any], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.launches.append((self.kernel, dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs))


@contextmanager
def record(*modules: Any) -> Iterator[list[tuple[JITFunction[Any], dict[str, Any]]]]:
    """Replace the `*_kernel` functions of modules by recorders; the launches made within the block."""
    launches: list[tuple[JITFunction[Any], dict[str, Any]]] = []
    kernels = [(m, name) for m in modules for name in vars(m) if name.endswith("_kernel")]
    originals = [(m, name, getattr(m, name)) for m, name in kernels]
    for module, name, kernel in originals:
        setattr(module, name, Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for module, name, kernel in originals:
            setattr(module, name, kernel)


def source_of(kernel: JITFunction[Any], arguments: dict[str, Any]) -> tuple[ASTSource, dict[str, Any]]:
    """(what the launcher would have compiled, for aligned tensors; the compiler's options)."""
    types: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    aligned: dict[Any, Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            types[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                aligned[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            types[parameter.name] = "fp32"
        else:
            types[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    return source, {name: arguments[name] for name in OPTIONS if name in arguments}


def compile_launch(kernel: JITFunction[Any], arguments: dict[str, Any]) -> Compiled:
    """Compile one recorded launch for sm_90 and read its resources."""
    source, options = source_of(kernel, arguments)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, spills = _resources(compiled.asm["cubin"])
    return Compiled(
        kernel.__name__,
        registers,
        spills,
        compiled.metadata.shared,
        ptx.count("wgmma.mma_async"),
        ptx.count("mma.sync"),
        ptx.count("cp.async.c"),
        len(re.findall(r"ld\.global[.\w:]*\.v4\.b32|ld\.global[.\w:]*\.v2\.b64", ptx)),
        depths(compiled.asm["ttgir"]),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory, which hold spills)."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2]) + int(found[3])
