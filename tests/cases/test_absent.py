"""PC-01, NU-05: what is not there, or not on this device, is refused by name before anything is computed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from octavo import LLM
from octavo.errors import ConfigError


def serve(model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo", "serve", str(model), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def test_pc01_adapters(client: httpx.AsyncClient, model: Path) -> None:
    """There are no adapters, so none can share another's blocks: their flags and names are unknown."""
    done = serve(model, "--lora-modules", "a=/nowhere")
    assert done.returncode == 2
    assert "--lora-modules" in done.stderr
    answer = await client.post("/v1/completions", json={"model": "tiny:a", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    with pytest.raises(ConfigError, match="enable_lora"):
        LLM(str(model), enable_lora=True)


def test_nu05_an_8_bit_cache_where_nothing_computes_with_it(model: Path) -> None:
    """On CUDA its divergence is measured by benches and tests/kernels/gpu_fp8_kv.py; elsewhere it is an error."""
    with pytest.raises(ConfigError, match=r"kv.cache.dtype.*fp8|fp8.*kv.cache.dtype"):
        LLM(str(model), device="cpu", kv_cache_dtype="fp8")
    done = serve(model, "--device", "cpu", "--kv-cache-dtype", "fp8")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
