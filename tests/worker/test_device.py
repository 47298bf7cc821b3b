"""Facts about the machine, read from files of a made-up one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.worker import device
from octavo.worker.device import cpu_facts, find_device, physical_cores

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    9000000 kB\n"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What /proc and /sys hold; two cores with two threads each."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    held = {topology.format(cpu): f"{cpu % 2},{cpu % 2 + 2}\n" for cpu in range(4)}
    held |= {"/proc/meminfo": MEMINFO, "/proc/cpuinfo": "processor : 0\nflags : fpu avx2 avx512f\n"}
    monkeypatch.setattr(device, "_read", lambda path: held.get(path, ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    return held


def test_hyperthreads_and_quotas_do_not_count_as_cores(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert physical_cores() == 2
    files["/sys/fs/cgroup/cpu.max"] = "150000 100000\n"
    assert physical_cores() == 1
    files["/sys/fs/cgroup/cpu.max"] = "max 100000\n"
    assert physical_cores() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3}, raising=False)
    assert physical_cores() == 1


def test_memory_is_the_control_groups_where_that_is_less(files: dict[str, str]) -> None:
    assert (cpu_facts().total_bytes, cpu_facts().free_bytes) == (16_000_000 * 1024, 9_000_000 * 1024)
    files["/sys/fs/cgroup/memory.max"] = "4000000000\n"
    files["/sys/fs/cgroup/memory.current"] = "1000000000\n"
    assert (cpu_facts().total_bytes, cpu_facts().free_bytes) == (4_000_000_000, 3_000_000_000)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert cpu_facts().total_bytes == 16_000_000 * 1024


@pytest.mark.parametrize(("flag", "native"), [("avx512_bf16", True), ("amx_bf16", True), ("avx512_fp16", False)])
def test_bfloat16_is_native_where_the_cpu_multiplies_it(files: dict[str, str], flag: str, native: bool) -> None:
    assert not cpu_facts().has_bfloat16
    files["/proc/cpuinfo"] = f"flags\t\t: fpu avx2 {flag}\n"
    assert cpu_facts().has_bfloat16 == native


def test_this_machine_has_memory_and_cores() -> None:
    facts = find_device("cpu")
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert 1 <= facts.num_cores <= (os.cpu_count() or 1)
    assert Path("/proc/cpuinfo").exists() or not facts.has_bfloat16
