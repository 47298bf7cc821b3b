"""The optional FlashAttention backend without the package, and with a stand-in for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo import envs
from octavo.attention.base import make_backend
from octavo.config import make_engine_config
from octavo.errors import ConfigError
from octavo.worker.device import DeviceFacts, check_backend
from octavo.worker.resolve import resolve_config

FACTS = {"name": "", "total_bytes": 1 << 37, "free_bytes": 1 << 37, "num_cores": 8, "has_bfloat16": True}


def test_cases_in_the_interpreter() -> None:
    """In a process that sets TRITON_INTERPRET before it imports triton."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "flash_cases.py"],
        cwd=Path(__file__).parent,
        env=envs.child(TRITON_INTERPRET="1", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(ConfigError, match=r"--attention-backend flash .*pip install tokenspeed-fa3"):
        make_backend("flash")


def test_decode_steps_keep_their_graphs_and_fused_kernels() -> None:
    config = make_engine_config({"attention_backend": "flash"})
    resolved = resolve_config(config, DeviceFacts(kind="cuda", **FACTS), 8192).execution
    assert (resolved.attention_backend, resolved.decode_kernels, resolved.enforce_eager) == ("flash", "auto", False)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="--attention-backend flash needs a CUDA device"):
        check_backend("flash", DeviceFacts(kind="cpu", **FACTS))
