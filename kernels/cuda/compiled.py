"""CUDA C++ kernels: compiled by NVRTC (torch brings it) when they are first needed, kept in Triton's cache of compiled
kernels, and launched through the driver. No nvcc, no headers, nothing to build at install.

A kernel's sizes and options are macros; arguments are passed as the bytes that its parameters are.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from cuda.bindings import driver, nvrtc
from triton.runtime.cache import get_cache_manager

HERE = Path(__file__).parent
ARCH = "sm_90a"
"""What these kernels are for: wgmma, clusters and the tensor memory accelerator of Hopper."""


def check(result: tuple[Any, ...]) -> Any:
    """What a call of the CUDA API gave; RuntimeError when it failed."""
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if len(values) == 1 else values


@cache
def compile_source(file: str, macros: tuple[tuple[str, int], ...], prelude: str = "") -> bytes:
    """The cubin of kernels/cuda/<file> with `prelude` (source text) before it. RuntimeError with the compiler's log."""
    source = prelude + (HERE / file).read_text()
    options = [f"--gpu-architecture={ARCH}", "--std=c++17", *(f"-D{name}={value}" for name, value in macros)]
    key = sha256("\n".join([str(nvrtc.nvrtcVersion()), *options, source]).encode()).hexdigest()
    store = get_cache_manager(key)
    kept = store.get_file("kernel.cubin")
    if kept is not None:
        return Path(kept).read_bytes()
    cubin = _compile(source, file, options)
    store.put(cubin, "kernel.cubin", binary=True)
    return cubin


def _compile(source: str, file: str, options: list[str]) -> bytes:
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status.value != 0:
            log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
            check(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{file} does not compile: {log.decode()}")
        cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        check(nvrtc.nvrtcDestroyProgram(program))


_loading = Lock()


@cache
def load_kernel(cubin: bytes, name: str, shared_bytes: int) -> Any:
    """A kernel of a cubin on the current device, allowed that much dynamic shared memory. Stays loaded."""
    with _loading:
        module = check(driver.cuModuleLoadData(cubin))
        function = check(driver.cuModuleGetFunction(module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return function


@dataclass(frozen=True, slots=True)
class Shape:
    """How many threads a launch has, and what each program gets."""

    programs: int
    threads: int
    cluster: int
    shared_bytes: int


def start(function: Any, shape: Shape, parameters: list[bytes], stream: int, *, pdl: bool) -> None:
    """Launch with parameters given as their bytes; `pdl`: as a dependent launch (triton/launch.py)."""
    buffers = [ctypes.create_string_buffer(value, len(value)) for value in parameters]
    pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.programs, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.threads, 1, 1
    config.sharedMemBytes = shape.shared_bytes
    config.hStream = driver.CUstream(stream)
    attributes = [_cluster(shape.cluster), *([_dependent()] if pdl else [])]
    config.attrs, config.numAttrs = attributes, len(attributes)
    check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


def _cluster(size: int) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value = driver.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = size, 1, 1
    attribute.value = value
    return attribute


def _dependent() -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value = driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    return attribute
