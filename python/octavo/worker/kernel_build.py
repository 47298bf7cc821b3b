"""Builds the kernels of a model's steps in processes of their own (build_kernels.py), while the engine imports torch
and loads weights: into the cache that Triton reads them from later. Imports no torch.

It is a head start only: a kernel that is not there when a step needs it is compiled then. When a build for the same
model, options, device and sources has ended well before, a mark in the cache says so and none is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from octavo import envs
from octavo.config import EngineConfig
from octavo.protocol import Progress
from octavo.worker import triton_files
from octavo.worker.device import DeviceFacts, physical_cores

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "triton", "flash", "flashinfer")
MAX_PROCESSES = 16
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The build forks, which is no good beside threads that libraries start when they are imported."""
SOURCES = ("kernels/triton", "layers/fused", "worker", "sampling")
"""Folders whose files decide which kernels there are."""
MAJOR, MINOR = 75, 76
"""Attributes of a device in the CUDA driver's interface: its compute capability."""


class KernelBuild:
    """A build that runs, or (`process` None) one that is not needed."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        self._process = process

    def wait(self, progress: Progress) -> None:
        """Until the kernels are built that the start needs; those of other steps may still be in the making."""
        process = self._process
        if process is None:
            return
        assert process.stdout is not None, "it is a pipe"
        needed = int(process.stdout.readline() or -1)
        left = set(range(needed))
        while left and (line := process.stdout.readline()):
            left.discard(int(line))
            progress("kernels", 1 - len(left) / needed)
        if needed < 0 or left:
            logger.warning("kernels could not be built ahead (exit code %s): they are built one by one", process.wait())

    def close(self) -> None:
        """End it, if it still runs."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            assert process.stdout is not None, "it is a pipe"
            process.stdout.close()


def start(config: EngineConfig, raw_config: Mapping[str, Any]) -> KernelBuild:
    """Start a build for a model with this config.json, if there is a device to build for and anything to build."""
    if config.execution.device == "cpu" or config.execution.attention_backend not in BACKENDS:
        return KernelBuild(None)
    device = find_cuda()
    if device is None:
        return KernelBuild(None)
    triton_files.start_hash()
    facts, capability = device
    # Where the weights are, and what they are, changes no kernel.
    model = replace(config.model, model="", tokenizer=None, revision=None, load_format="auto", seed=0)
    order = {
        "config": asdict(replace(config, model=model)),
        "raw_config": raw_config,
        "device": asdict(facts),
        "capability": capability,
    }
    mark = envs.kernel_cache_dir() / f"octavo-{key_of(order)}"
    if mark.exists():
        return KernelBuild(None)
    command = [sys.executable, "-m", "octavo.worker.build_kernels", str(mark)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=envs.child(**ONE_THREAD)
    )
    assert process.stdin is not None, "it is a pipe"
    with contextlib.suppress(BrokenPipeError), process.stdin:  # one that has ended already is noticed by `wait`
        process.stdin.write(json.dumps(order).encode())
    return KernelBuild(process)


def key_of(order: Mapping[str, Any]) -> str:
    """Names what is to be built, and from which sources."""
    content = hashlib.sha256(json.dumps([order, version("triton"), version("torch")], sort_keys=True).encode())
    package = Path(__file__).parents[1]
    for folder in SOURCES:
        for file in sorted((package / folder).glob("*.py")):
            content.update(file.read_bytes())
    return content.hexdigest()[:32]


def find_cuda() -> tuple[DeviceFacts, tuple[int, int]] | None:
    """The first CUDA device as its driver describes it, without a context; None where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    total = ctypes.c_size_t()
    if (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    ):
        return None
    capability = major.value, minor.value
    facts = DeviceFacts(
        kind="cuda",
        name="",
        total_bytes=total.value,
        free_bytes=total.value,
        num_cores=physical_cores(),
        has_bfloat16=capability >= (8, 0),
        has_fp8=capability >= (8, 9),
    )
    return facts, capability
