"""Launches through handles of compiled kernels, for steps that no CUDA graph holds: Triton's own way through its
arguments costs the host 16 us or more a launch, a handle about 10.

A handle is found by the kernel, its arguments' dtypes, its constants and its options. So a kernel that is launched here
must not be specialized on anything else: integers are constants or in `do_not_specialize`, and pointers that may be
misaligned (slices of an arena) in `do_not_specialize_on_alignment`.
"""

from __future__ import annotations

from typing import Any

from triton.compiler import CompiledKernel

_handles: dict[tuple[Any, ...], CompiledKernel] = {}


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
    if handle is not None:
        handle[grid](*args, *constants.values())
        return
    options = {"launch_pdl": True} if pdl else {}
    compiled = kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages, **options)
    if isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
        assert list(kernel.arg_names)[len(args) :] == list(constants), "constants in the order of the parameters"
        _handles[key] = compiled
