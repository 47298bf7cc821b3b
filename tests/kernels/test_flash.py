"""The optional backends FlashAttention and FlashInfer without their packages, and with stand-ins for them."""

from __future__ import annotations

import sys

import pytest
from case_files import CaseFile, CaseRun, runs

from octavo.attention.base import make_backend
from octavo.config import make_engine_config
from octavo.errors import ConfigError
from octavo.worker.device import DeviceFacts, check_backend
from octavo.worker.resolve import resolve_config

FACTS = {"name": "", "total_bytes": 1 << 37, "free_bytes": 1 << 37, "num_cores": 8, "has_bfloat16": True}


@runs(CaseFile("flash_cases.py"), CaseFile("flashinfer_cases.py"))
def test_cases_in_the_interpreter(case_run: CaseRun) -> None:
    assert case_run.passed, case_run.said


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("flash", "flash_attn_interface", "tokenspeed-fa3"), ("flashinfer", "flashinfer", "flashinfer-python")],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"--attention-backend {name} .*pip install {package}"):
        make_backend(name)


@pytest.mark.parametrize("name", ["flash", "flashinfer"])
def test_decode_steps_keep_their_graphs_and_fused_kernels(name: str) -> None:
    config = make_engine_config({"attention_backend": name})
    resolved = resolve_config(config, DeviceFacts(kind="cuda", **FACTS), 8192).execution
    assert (resolved.attention_backend, resolved.decode_kernels, resolved.enforce_eager) == (name, "auto", False)


@pytest.mark.parametrize("name", ["flash", "flashinfer"])
def test_a_cpu_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--attention-backend {name} needs a CUDA device"):
        check_backend(name, DeviceFacts(kind="cpu", **FACTS))
