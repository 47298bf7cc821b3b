"""The KV cache in e4m3 without a GPU: reading it in the interpreter, its kernels compiled for an H200, and what is
refused."""

from __future__ import annotations

import offline_compile
import pytest
import torch
from case_files import CaseFile, CaseRun, runs
from fused_models import LLAMA_8B, QWEN3_06B, Sizes
from sm90_compile import compile_launch

from octavo.config import make_engine_config
from octavo.errors import ConfigError
from octavo.kernels.triton import paged_decode, paged_prefill, rotate_write
from octavo.kernels.triton.decode_attention_launches import (
    AttentionLayer,
    AttentionScratch,
    DecodeRows,
    HeadShape,
    attend,
)
from octavo.worker.cache_bytes import kv_token_bytes
from octavo.worker.device import DeviceFacts
from octavo.worker.resolve import kv_dtype, resolve_config

META = torch.device("meta")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@runs(CaseFile("fp8_kv_cases.py"))
def test_cases_in_the_interpreter(case_run: CaseRun) -> None:
    assert case_run.passed, case_run.said


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.mark.parametrize("sizes", [LLAMA_8B, QWEN3_06B], ids=["llama-8b", "qwen3-0.6b"])
@pytest.mark.parametrize(("rows", "max_kv_len"), [(1, 200), (8, 4000), (64, 200), (128, 4000)])
def test_fused_decode_attention_compiles(sizes: Sizes, rows: int, max_kv_len: int) -> None:
    heads = HeadShape(sizes.heads, sizes.kv_heads, sizes.head_dim)
    gain = meta(sizes.head_dim) if sizes.qk_norm else None
    table = meta(4096, sizes.head_dim, dtype=torch.float32)
    layer = AttentionLayer(heads, sizes.head_dim**-0.5, 0, gain, gain, 1e-6, table)
    decoding = DecodeRows(
        meta(rows, 70, dtype=torch.int32), meta(rows, dtype=torch.int32), meta(rows, dtype=torch.int32), max_kv_len
    )
    cache = meta(9, 2, sizes.kv_heads, 64, sizes.head_dim, dtype=FP8)
    qkv = meta(rows, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim)
    out = meta(rows, sizes.heads * sizes.head_dim)
    for launch in attend(layer, qkv, cache, decoding, AttentionScratch.allocate(heads, rows, META), out):
        compiled = compile_launch(launch)
        assert compiled.spill_bytes == 0


def test_paged_kernels_compile() -> None:
    cache = meta(9, 2, 8, 64, 128, dtype=FP8)
    ints = meta(64, dtype=torch.int32)
    table = meta(64, 70, dtype=torch.int32)
    plan = paged_decode.plan_decode(4, 32, 8, 128, 1, 4096)
    part, stat = (meta(size, dtype=torch.float32) for size in plan.scratch_sizes(4, 8))
    with offline_compile.record(paged_decode, paged_prefill, rotate_write) as launches:
        q = meta(4, 32, 128)
        paged_decode.paged_decode(
            q, cache, table, ints, ints, torch.empty_like(q), plan, part, stat,
            num_rows=4, scale=0.1, window=0, soft_cap=0.0,
        )  # fmt: skip
        q = meta(300, 32, 128)
        paged_prefill.paged_prefill(
            q, cache, table, ints, ints, ints, torch.empty_like(q),
            first_row=0, num_rows=3, max_query_len=200, scale=0.1, window=0, soft_cap=0.0,
        )  # fmt: skip
        rotate_write.rotate_write(
            meta(300, 48 * 128), meta(300, 128, dtype=torch.float32), cache, meta(300, dtype=torch.int64), None, None,
            num_heads=32, norm_eps=1e-6,
        )  # fmt: skip
    assert len(launches) >= 3
    for launch in launches:
        compiled = offline_compile.compile_launch(*launch)
        assert compiled.spill_bytes == 0, compiled
        if compiled.name in ("decode_kernel", "prefill_kernel"):
            assert compiled.wgmma > 0
            assert compiled.async_copies > 0
            assert compiled.depths == (launch[1]["num_stages"] - 1,), "e4m3 is widened in registers"


def facts(**changes: object) -> DeviceFacts:
    base = {"kind": "cuda", "name": "", "total_bytes": 1 << 37, "free_bytes": 1 << 37, "num_cores": 8}
    return DeviceFacts(**{**base, "has_bfloat16": True, "has_fp8": True, **changes})  # type: ignore[arg-type]


def test_the_cache_takes_half_the_bytes() -> None:
    sizes = {
        "num_layers": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "value_dim": 0,
        "state_sizes": (),
        "layer_windows": (0,) * 32,
    }
    model = type("Model", (), sizes)()
    config = resolve_config(make_engine_config({"kv_cache_dtype": "fp8"}), facts(), 8192)
    assert kv_dtype(config) == "fp8"
    assert kv_token_bytes(model, "fp8") * 2 == kv_token_bytes(model, "bfloat16")
    assert kv_dtype(resolve_config(make_engine_config({}), facts(), 8192)) == "bfloat16"


@pytest.mark.parametrize(
    ("device", "options"),
    [({"kind": "cpu", "has_fp8": False}, {}), ({"has_fp8": False}, {}), ({}, {"attention_backend": "reference"})],
)
def test_other_devices_are_refused(device: dict[str, object], options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 needs a CUDA device with fp8"):
        resolve_config(make_engine_config({"kv_cache_dtype": "fp8", **options}), facts(**device), 8192)
