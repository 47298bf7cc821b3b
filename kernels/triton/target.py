"""Which device kernels are for: the one that tensors are on; or, in a process that compiles kernels ahead for a device
it does not touch, the one it was told of, for which tensors on "meta" stand.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch

AMD_SHARED_BYTES: Final = 64 << 10
"""What a program may use of shared memory on gfx90a and gfx942."""
SHARED_KIBIBYTES: Final = (
    ((12, 0), 99),
    ((9, 0), 227),
    ((8, 8), 99),
    ((8, 7), 163),
    ((8, 1), 99),
    ((8, 0), 163),
    ((7, 5), 64),
    ((7, 0), 96),
)
"""(compute capability from which it holds, what a program may use of it), of NVIDIA's devices."""
OTHER_BYTES: Final = 8 << 10
"""Of these, at most for what is not loaded ahead, unless a kernel knows better."""

_ahead: tuple[int, int] | None = None


class _Absent:
    """What Triton's compiler asks of a driver, without a device."""

    def __init__(self, capability: tuple[int, int]) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(capability: tuple[int, int]) -> None:
    """From now on this process compiles (and can't launch) for a CUDA device of this capability."""
    from triton.runtime import driver

    global _ahead
    _ahead = capability
    driver.set_active(_Absent(capability))


def build_driver() -> None:
    """Build Triton's own module for the driver, which it compiles from C when a process first asks for the device."""
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()


def build_launcher(kernel: Any) -> None:
    """Build what starts a compiled kernel from Python: Triton compiles it from C at the kernel's first launch, which
    takes a tenth of a second. It needs the driver's library, but no device."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(kernel.src, kernel.metadata)


def capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device of NVIDIA's; (0, 0) of any other."""
    if is_amd():
        return 0, 0
    if device.type == "meta" and _ahead is not None:
        return _ahead
    return _asked(device) if device.type == "cuda" else (0, 0)


@cache
def _asked(device: torch.device) -> tuple[int, int]:
    """Once: launches outside of graphs want to know."""
    return torch.cuda.get_device_capability(device)


def is_amd() -> bool:
    """Whether this PyTorch's "cuda" devices are AMD's."""
    return torch.version.hip is not None


def shared_bytes(device: torch.device) -> int:
    """What a program may use of shared memory. Devices that are none (the interpreter's) count as Hopper's."""
    if is_amd():
        return AMD_SHARED_BYTES
    found = capability(device)
    return next((size << 10 for least, size in SHARED_KIBIBYTES if found >= least), 227 << 10)


def is_small(device: torch.device) -> bool:
    """Whether it is NVIDIA's, but has less shared memory than Hopper and the data centers' Blackwell, and tensor cores
    that read registers: tiles are smaller there."""
    return not is_amd() and shared_bytes(device) < 227 << 10


def stages(wanted: int, tile_bytes: int, device: torch.device | None = None, other_bytes: int = OTHER_BYTES) -> int:
    """How many stages the loop of a kernel with tables for Hopper has, if it loads `tile_bytes` a turn: as many as
    wanted, or on other devices (for which the compiler loads one turn less ahead) as there is room for beside
    `other_bytes` (on AMD's, OTHER_BYTES at least). No device: kernels that fit all of NVIDIA's."""
    if is_amd():
        room = AMD_SHARED_BYTES - max(other_bytes, OTHER_BYTES)
    elif device is not None and is_small(device):
        room = shared_bytes(device) - other_bytes
    else:
        return wanted
    return max(1, min(wanted, 1 + room // tile_bytes))


def runs_kernels(device: torch.device) -> bool:
    """Whether tensors on the device go to kernels for a GPU (or are compiled for one)."""
    return device.type == "cuda" or (device.type == "meta" and _ahead is not None)


def has_dependent_launches(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one ahead of it has ended (PDL, from sm_90)."""
    return capability(device) >= (9, 0)
