"""Facts about the device that steps will run on: what memory planning and defaults need, and nothing more.

Torch is imported only where CUDA is asked for, so that the fake runner needs none.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names in /proc/cpuinfo (x86 `flags`, Arm `Features`) of instructions that multiply bfloat16."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """`free_bytes` is what nobody uses now; on CUDA, Octavo's own context is already counted as used."""

    kind: str
    """"cpu" or "cuda"."""
    name: str
    total_bytes: int
    free_bytes: int
    num_cores: int
    """Physical cores that this process may use."""
    has_bfloat16: bool
    """Whether it computes in bfloat16 natively."""
    has_fp8: bool = False
    """Whether it multiplies 8-bit floats (e4m3)."""


def find_device(choice: str) -> DeviceFacts:
    """Facts of the device that `--device` names; "auto" takes CUDA where there is one."""
    if choice == "cpu":
        return cpu_facts()
    if choice == "auto" and not may_have_cuda():
        return cpu_facts()
    import torch

    if torch.cuda.is_available():
        return cuda_facts()
    if choice == "cuda":
        raise ConfigError("--device cuda: torch sees no CUDA device; use --device cpu", "device")
    return cpu_facts()


def may_have_cuda() -> bool:
    """Whether the driver of an NVIDIA GPU is there; torch, which takes long to import, may still find none to use."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def check_backend(backend: str, device: DeviceFacts) -> None:
    """ConfigError when the attention backend can't run there. Triton's interpreter (for tests) runs anywhere."""
    if backend in ("flash", "flashinfer") and device.kind == "cpu":
        raise ConfigError(f"--attention-backend {backend} needs a CUDA device; use --attention-backend cpu")
    if backend == "triton" and device.kind == "cpu":
        from triton import knobs

        if not knobs.runtime.interpret:
            raise ConfigError("--attention-backend triton needs a CUDA device; use --attention-backend cpu")


def cuda_facts() -> DeviceFacts:
    """The current CUDA device. Creates its context."""
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return DeviceFacts(
        kind="cuda",
        name=torch.cuda.get_device_name(),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        num_cores=physical_cores(),
        has_bfloat16=torch.cuda.get_device_capability() >= (8, 0),
        has_fp8=torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9),
    )


def cpu_facts() -> DeviceFacts:
    """This machine's memory (or the control group's share of it) and the cores that this process may use."""
    total_bytes, free_bytes = _memory()
    num_cores = physical_cores()
    has_bfloat16 = not BF16_FLAGS.isdisjoint(_cpu_flags())
    return DeviceFacts("cpu", f"CPU, {num_cores} cores", total_bytes, free_bytes, num_cores, has_bfloat16)


def _read(path: str) -> str:
    """A file of /proc or /sys; empty where the system has none."""
    file = Path(path)
    return file.read_text() if file.is_file() else ""


def _cpu_flags() -> set[str]:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def _memory() -> tuple[int, int]:
    """(total, available) bytes, not more than a version 2 control group allows."""
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines())
    if "MemAvailable" in fields:
        total = int(fields["MemTotal"].split()[0]) * 1024
        available = int(fields["MemAvailable"].split()[0]) * 1024
    else:
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < total:
        total = int(limit)
        available = min(available, total - int(_read("/sys/fs/cgroup/memory.current")))
    return total, available


def physical_cores() -> int:
    """Cores in this process's affinity mask, hyperthreads counted once, capped by the control group's CPU quota."""
    cpus = core_cpus()
    if not cpus:
        return os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    limit = max(1, int(quota) // int(period)) if quota.isdigit() else len(cpus)
    return max(1, min(len(cpus), limit))


def core_cpus() -> list[int]:
    """One processor of each core in this process's affinity mask; empty where the system has no such masks."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    path = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    first: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        first.setdefault(_read(path.format(cpu)) or str(cpu), cpu)
    return list(first.values())
