"""Launches through handles of compiled kernels, for steps that no CUDA graph holds: Triton's own way through its
arguments costs the host 16 us or more a launch, a handle about 10.

A handle is found by the kernel, its arguments' dtypes, its constants and its options. So a kernel that is launched here
must not be specialized on anything else: integers are constants or in `do_not_specialize`, and pointers that may be
misaligned (slices of an arena) in `do_not_specialize_on_alignment`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.compiler import CompiledKernel

_handles: dict[tuple[Any, ...], CompiledKernel] = {}
_only_compile = False
_known: set[tuple[Any, ...]] = set()
"""Launches that were compiled since `compiling` began."""
_compiled: list[Any] = []
"""Their kernels."""


@contextmanager
def compiling(executor: Executor | None = None) -> Iterator[None]:
    """Within, launches only compile their kernels, on all cores at once, and what they would write is left as it is;
    at the end the kernels are loaded, as to load one later would wait for the device. With an `executor`, it gets the
    compilations, and nothing is loaded."""
    global _only_compile
    if _only_compile:
        yield
        return
    try:
        with executor or ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
            _only_compile = True
            try:
                yield
            finally:
                _only_compile = False
        if executor is None:
            for kernel in _compiled:
                _load(kernel)
    finally:
        _known.clear()
        _compiled.clear()


def _load(kernel: Any) -> None:
    """Bring what `warmup` gave (a kernel, or the promise of one; nothing in the interpreter) to the device."""
    kernel = kernel.result() if hasattr(kernel, "result") else kernel
    if isinstance(kernel, CompiledKernel):
        _ = kernel.run


def compile_only(kernel: Any, *args: Any, **values: Any) -> None:
    """Compile a kernel as a launch with these arguments would (within `compiling`)."""
    _compiled.append(kernel.warmup(*args, **values))


def only_compiling() -> bool:
    """Whether launches must not run."""
    return _only_compile


def is_known(key: tuple[Any, ...]) -> bool:
    """Whether a launch like this one was compiled already since `compiling` began."""
    known = key in _known
    _known.add(key)
    return known


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    *,
    num_warps: int,
    num_stages: int = 1,
    pdl: bool = False,
) -> None:
    """Start `kernel` with its run-time arguments, then its constants, both in the order of its parameters.

    `pdl`: as a dependent launch (launch.py). All launches are on one device.
    """
    dtypes = [getattr(arg, "dtype", None) for arg in args]
    key = (id(kernel), num_warps, num_stages, pdl, *dtypes, *constants.values())
    handle = _handles.get(key)
    if handle is not None and not _only_compile:
        handle[grid](*args, *constants.values())
        return
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if pdl:
        options["launch_pdl"] = True
    if _only_compile:
        if not is_known(key):
            compile_only(kernel, *args, **constants, grid=grid, **options)
        return
    compiled = kernel[grid](*args, **constants, **options)
    if isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
        assert list(kernel.arg_names)[len(args) :] == list(constants), "constants in the order of the parameters"
        _handles[key] = compiled
