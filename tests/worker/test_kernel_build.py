"""Kernels built ahead of the engine: what is waited for, what happens when a build dies, which kernels are found."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from octavo.config import make_engine_config
from octavo.models.config import normalize_config
from octavo.worker import kernel_build
from octavo.worker.device import DeviceFacts
from octavo.worker.kernel_build import KernelBuild
from octavo.worker.step_kinds import decode_kinds, mixed_kinds

CARD = DeviceFacts("cuda", "", 140 << 30, 140 << 30, 2, has_bfloat16=True, has_fp8=True)
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def process(program: str) -> subprocess.Popen[bytes]:
    pipe, command = subprocess.PIPE, [sys.executable, "-c", program]
    started = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
    assert started.stdin is not None
    started.stdin.close()  # as `start` does when it has said what to build
    return started


def test_waits_for_what_the_start_needs_and_no_longer() -> None:
    program = "import time\nfor line in (2, 1, 7, 0): print(line, flush=True)\ntime.sleep(600)"
    running = process(program)
    build, shares = KernelBuild(running), []
    build.wait(lambda stage, share: shares.append((stage, share)))
    assert shares == [("kernels", 0.5), ("kernels", 0.5), ("kernels", 1.0)]
    assert running.poll() is None, "other kernels are still in the making"
    build.close()
    assert running.returncode is not None


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "print(2); print(0); raise SystemExit(3)"])
def test_a_build_that_dies_is_said_and_forgotten(program: str, caplog: pytest.LogCaptureFixture) -> None:
    build = KernelBuild(process(program))
    with caplog.at_level(logging.WARNING):
        build.wait(lambda stage, share: None)
    assert "exit code 3" in caplog.text
    build.close()


def start(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """The commands that a start runs, on a machine with a card."""
    commands: list[Any] = []

    class Recorder:
        def __init__(self, command: list[str], **_: Any) -> None:
            commands.append(command)
            self.stdin = open("/dev/null", "wb")  # noqa: SIM115

    monkeypatch.setattr(kernel_build, "find_cuda", lambda: (CARD, (9, 0)))
    monkeypatch.setattr(kernel_build.subprocess, "Popen", Recorder)
    kernel_build.start(make_engine_config(options), QWEN3)
    return commands


ORPHAN = """
import os
ours, theirs = os.pipe()
os.dup2(theirs, 1)
os.close(theirs)
os.close(ours)
from octavo.worker.build_kernels import start_processes
done, say = os.pipe()
children = start_processes([lambda: os.write(say, b"x")] * 9, 0, 2)
assert {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children} == {1}
assert os.read(done, 99) == b"xx"
"""


def test_a_build_whose_engine_has_gone_ends_in_silence() -> None:
    """Each process ends with the kernel that it works on."""
    done = subprocess.run([sys.executable, "-c", ORPHAN], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_build_that_dies_at_once_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    popen = subprocess.Popen

    def dead(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = popen([sys.executable, "-c", ""], **options)
        process.wait(60)
        return process

    monkeypatch.setattr(kernel_build, "find_cuda", lambda: (CARD, (9, 0)))
    monkeypatch.setattr(kernel_build.triton_files, "start_hash", lambda: None)
    monkeypatch.setattr(kernel_build.subprocess, "Popen", dead)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    build = kernel_build.start(make_engine_config({"model": "m"}), QWEN3)
    build.wait(lambda stage, fraction: None)
    build.close()


def test_a_build_is_started_once_a_model_and_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (command,) = start(monkeypatch, model="here")
    Path(command[-1]).touch()
    assert start(monkeypatch, model="elsewhere", seed=3) == []
    assert len(start(monkeypatch, model="here", max_num_seqs=8)) == 1
    assert start(monkeypatch, model="here", device="cpu", max_num_seqs=8) == []


DRIVER_CALLS = [
    "cuCtxGetCurrent",
    "cuCtxGetLimit",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuCtxSetLimit",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuFuncSetCacheConfig",
    "cuGetErrorString",
    "cuLaunchKernelEx",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuOccupancyMaxActiveClusters",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
]


def make_driver(folder: Path) -> None:
    """A library with the driver's names, for launchers to be linked with."""
    source = folder / "driver.c"
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in DRIVER_CALLS))
    library = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(["cc", *library, str(source)], check=True)


def test_kernels_of_both_rounds_are_found_and_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: it makes Triton believe in a device."""
    make_driver(tmp_path)
    for name in ("TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    options = make_engine_config({"model": "", "max_num_seqs": 32, "max_num_batched_tokens": 512})
    order = {"config": asdict(options), "raw_config": QWEN3, "device": asdict(CARD), "capability": [9, 0]}
    program = (
        "import sys, octavo.worker.kernel_jobs as b\n"
        "order = b.Order.read(sys.stdin.read()); assert order\n"
        "needed, rest = b.rounds_of_jobs(order)\n"
        "needed[0](); needed[1]()\nprint(len(needed), len(rest))\n"
        # A forward pass on a device indexes by what `prepare` gives, even where it only compiles.
        "import torch; from octavo.kernels.triton import handles, prepare\n"
        "ints = torch.zeros(64, dtype=torch.int32)\n"
        "trash = torch.full((3, 64), 2**40); del trash\n"
        "with handles.compiling(b.Collector()):\n"
        "    out = prepare.prepare_step(ints, ints, ints, ints, ints[None, :, None], ints, block_size=4)\n"
        "assert not any(part.any() for part in (out.token_id_t, out.position_t, out.slot_mapping_gt))\n"
    )
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(order), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    needed, rest = map(int, done.stdout.split())
    assert needed > 20
    assert rest > 10
    for pattern in ("*/*.cubin", "*/cuda_utils*.so", "*/__triton_launcher*.so"):
        assert len(list(cache.glob(pattern))) == 1


def test_layers_of_every_kind_are_kept() -> None:
    from octavo.worker.kernel_jobs import few_layers  # imports torch

    layers = {**QWEN3, "num_hidden_layers": 6, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}
    normal = normalize_config(layers)
    kept = few_layers(normal)
    assert kept.num_layers == len(kept.layer_windows) == 4
    assert kept.layer_windows == (0, 0, 64, 64)
    assert few_layers(kept) == kept


def test_kinds_cover_one_row_and_all() -> None:
    kinds = mixed_kinds(max_rows=256, max_model_len=8192)
    prompts = {kind.num_rows for kind in kinds if kind.num_decode_rows == 0}
    assert prompts == {1, 129}
    assert {kind.num_decode_rows for kind in kinds} == {0, 1, 2, 4, 8, 16, 32, 64, 128}
    assert {kind.max_kv_len for kind in kinds} == {256, 8192}
    assert all(kind.num_rows <= 4 for kind in mixed_kinds(max_rows=4, max_model_len=100))
    assert [(kind.num_rows, kind.max_kv_len) for kind in decode_kinds([4, 1], 1000)] == [
        (1, 256), (4, 256), (1, 1000), (4, 1000),
    ]  # fmt: skip
