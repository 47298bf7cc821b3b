"""Which device kernels are for: the one that tensors are on; or, in a process that compiles kernels ahead for a device
it does not touch, the one it was told of, for which tensors on "meta" stand.
"""

from __future__ import annotations

from typing import Any

import torch

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
    """Of a CUDA device; (0, 0) of any other."""
    if device.type == "meta" and _ahead is not None:
        return _ahead
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def runs_kernels(device: torch.device) -> bool:
    """Whether tensors on the device go to kernels for a GPU (or are compiled for one)."""
    return device.type == "cuda" or (device.type == "meta" and _ahead is not None)


def has_dependent_launches(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one ahead of it has ended (PDL, from sm_90)."""
    return torch.version.hip is None and capability(device) >= (9, 0)
