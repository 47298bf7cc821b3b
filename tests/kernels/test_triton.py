"""Triton kernels without a GPU: numerics in the interpreter, and compilation for an H200 (sm_90)."""

from __future__ import annotations

from dataclasses import replace

import offline_compile
import pytest
import torch
from case_files import CaseFile, CaseRun, runs
from paged_steps import make_step

from octavo.attention.triton import TritonAttention
from octavo.kernels.triton import (
    apply_updates,
    kv_write,
    latent_write,
    paged_decode,
    paged_latent,
    paged_prefill,
    prepare,
)


@runs(CaseFile("interpreted.py"))
def test_numerics_in_the_interpreter(case_run: CaseRun) -> None:
    assert case_run.passed, case_run.said


MODELS = {"llama-8b": (32, 8, 128), "smollm2": (9, 3, 64), "qwen3-30b": (32, 4, 128), "gemma-2": (16, 8, 256)}
"""(query heads, KV heads, head dim)"""


def attention_inputs(heads: int, kv_heads: int, dim: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(q, cache, table, an int32 array): empty, for launches that are only recorded."""
    q = torch.empty(rows, heads, dim, dtype=dtype)
    cache = torch.empty(2, 2, kv_heads, 64, dim, dtype=dtype)
    return q, cache, torch.empty(rows, 32, dtype=torch.int32), torch.empty(rows + 1, dtype=torch.int32)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("rows", "max_kv_len"), [(1, 1024), (256, 190)])
def test_decode_compiles(model: str, rows: int, max_kv_len: int) -> None:
    heads, kv_heads, dim = MODELS[model]
    q, cache, table, ints = attention_inputs(heads, kv_heads, dim, rows, torch.bfloat16)
    plan = paged_decode.plan_decode(rows, heads, kv_heads, dim, 2, max_kv_len)
    scratch = torch.empty(1)
    with offline_compile.record(paged_decode) as launches:
        paged_decode.paged_decode(
            q, cache, table, ints, ints, q, plan, scratch, scratch,
            num_rows=rows, scale=0.1, window=0, soft_cap=0.0,
        )  # fmt: skip
    assert len(launches) == (2 if rows == 1 else 1)
    decode = offline_compile.compile_launch(*launches[0])
    assert decode.spill_bytes == 0
    assert decode.shared_bytes <= offline_compile.SHARED_LIMIT
    assert decode.wgmma > 0
    assert decode.mma == 0
    # All stages of K and V are in flight: a block id loaded too late would leave one.
    assert decode.depths == (plan.config.num_stages,)
    for launch in launches[1:]:
        assert offline_compile.compile_launch(*launch).spill_bytes == 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("rows", "queries"), [(1, 512), (16, 2048)])
def test_prefill_compiles(model: str, rows: int, queries: int) -> None:
    heads, kv_heads, dim = MODELS[model]
    q, cache, table, ints = attention_inputs(heads, kv_heads, dim, rows, torch.bfloat16)
    with offline_compile.record(paged_prefill) as launches:
        paged_prefill.paged_prefill(
            q, cache, table, ints, ints, ints, q,
            first_row=0, num_rows=rows, max_query_len=queries, scale=0.1, window=0, soft_cap=0.0,
        )  # fmt: skip
    prefill = offline_compile.compile_launch(*launches[0])
    assert prefill.spill_bytes == 0
    assert prefill.shared_bytes <= offline_compile.SHARED_LIMIT
    assert prefill.wgmma > 0
    assert prefill.mma == 0
    assert prefill.async_copies > 0
    assert prefill.depths == (launches[0][1]["num_stages"],)


SPILLS = {torch.float32: {"decode_kernel": 424, "prefill_kernel": 72}}
"""Bytes a thread, at most, that kernels in fp32 put off: they are for checks, not for speed."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_variant_compiles(dtype: torch.dtype) -> None:
    """Window, soft cap, odd head dim, blocks smaller than a tile; resources within the device's."""
    q, cache, table, ints = attention_inputs(12, 4, 80, 2, dtype)
    cache = torch.empty(2, 2, 4, 16, 80, dtype=dtype)
    plan = paged_decode.plan_decode(2, 12, 4, 80, dtype.itemsize, 4096)
    scratch = torch.empty(1)
    options = {"num_rows": 2, "scale": 0.1, "window": 100, "soft_cap": 30.0}
    with offline_compile.record(paged_decode, paged_prefill) as launches:
        paged_decode.paged_decode(q, cache, table, ints, ints, q, plan, scratch, scratch, **options)
        paged_prefill.paged_prefill(q, cache, table, ints, ints, ints, q, first_row=0, max_query_len=300, **options)
    assert len(launches) == 3
    for kernel, arguments in launches:
        compiled = offline_compile.compile_launch(kernel, arguments)
        assert compiled.shared_bytes <= offline_compile.SHARED_LIMIT
        assert compiled.spill_bytes <= SPILLS.get(dtype, {}).get(kernel.__name__, 0), compiled
        if kernel.__name__ != "reduce_kernel":
            on_tensor_cores = dtype == torch.float16
            assert (compiled.wgmma > 0) == on_tensor_cores, compiled
            assert compiled.depths == (arguments["num_stages"] - (0 if on_tensor_cores else 1),), compiled


@pytest.mark.parametrize(
    ("heads", "rows", "is_wide"),
    [
        (16, [(1, 900)], False),
        (16, [(64, 900)], True),
        (20, [(1, 900)], False),
        (128, [(1, 300)] * 64, True),
        (128, [(300, 300)], True),
    ],
)
def test_latent_attention_compiles(heads: int, rows: list[tuple[int, int]], is_wide: bool) -> None:
    """Decode rows and prompts of DeepSeek V2 Lite and V3, decode rows of GLM 4.7 Flash: no spills, latents loaded a
    tile ahead, products by wgmma, or by mma.sync where a program has too few heads for it."""
    step = make_step(rows, block_size=64, heads=heads, kv_heads=1, dim=576, value_dim=512, dtype=torch.bfloat16)
    with offline_compile.record(paged_latent) as launches:
        TritonAttention().attend_cached(step.spec, step.q_thd, step.ctx)
    for launch in launches:
        compiled = offline_compile.compile_launch(*launch)
        assert compiled.spill_bytes == 0
        assert compiled.shared_bytes <= offline_compile.SHARED_LIMIT
        if compiled.name == "reduce_kernel":
            continue
        assert (compiled.wgmma > 0, compiled.mma > 0) == (is_wide, not is_wide), compiled
        assert compiled.async_copies > 0
        assert compiled.depths == (launch[1]["num_stages"] - (0 if is_wide else 1),), compiled


@pytest.mark.parametrize("chunk", [0, 128])
def test_attention_with_sinks_compiles(chunk: int) -> None:
    """gpt-oss's heads, decode rows and a prompt."""
    step = make_step([(1, 200), (40, 90)], heads=64, kv_heads=8, block_size=64, dtype=torch.bfloat16, has_sinks=True)
    spec = replace(step.spec, chunk=chunk, window=0 if chunk else 128)
    with offline_compile.record(paged_decode, paged_prefill) as launches:
        TritonAttention().attend_cached(spec, step.q_thd, step.ctx, step.sink_h)
    assert {kernel.__name__ for kernel, _ in launches} >= {"decode_kernel", "prefill_kernel"}
    for launch in launches:
        compiled = offline_compile.compile_launch(*launch)
        assert compiled.spill_bytes == 0
        if compiled.name != "reduce_kernel":
            assert compiled.wgmma > 0
            assert compiled.depths == (launch[1]["num_stages"],), compiled


def test_small_kernels_compile() -> None:
    ints, longs = torch.empty(64, dtype=torch.int32), torch.empty(64, dtype=torch.int64)
    table, cache = torch.empty(4, 16, dtype=torch.int32), torch.empty(4, 2, 8, 64, 128, dtype=torch.bfloat16)
    k = torch.empty(64, 8, 128, dtype=torch.bfloat16)
    update, copies = torch.empty(3, 3, dtype=torch.int32), torch.empty(1, 2, dtype=torch.int32)
    with offline_compile.record(kv_write, prepare, apply_updates) as launches:
        kv_write.write_kv(k, k, cache, longs)
        prepare.prepare_step(ints, ints, ints[:8], ints[:9], table[None], longs, block_size=64)
        apply_updates.apply_updates(table, update, [cache], copies)
    assert [kernel.__name__ for kernel, _ in launches] == [
        "write_kernel", "prepare_kernel", "update_kernel", "copy_kernel",
    ]  # fmt: skip
    for launch in launches:
        assert offline_compile.compile_launch(*launch).spill_bytes == 0


@pytest.mark.parametrize(("heads", "is_interleaved"), [(16, True), (128, True), (20, False)])
def test_writing_of_latents_compiles(heads: int, is_interleaved: bool) -> None:
    """Heads of DeepSeek V2 Lite, V3 and (with halves rotated) GLM 4.7 Flash: no spills, no products."""
    tokens, latent, rotated = 4, 512, 64

    def rows(*sizes: int) -> torch.Tensor:
        return torch.empty(tokens, *sizes, dtype=torch.bfloat16)

    cos_sin, places = torch.empty(tokens, rotated), torch.empty(tokens, dtype=torch.int64)
    cache = torch.empty(2, 1, 1, 64, latent + rotated, dtype=torch.bfloat16)
    with offline_compile.record(latent_write) as launches:
        latent_write.latent_write(
            rows(heads, rotated), rows(latent), rows(rotated), cos_sin, torch.empty(latent, dtype=torch.bfloat16),
            cache, places, rows(heads, latent + rotated), eps=1e-6, is_interleaved=is_interleaved,
        )  # fmt: skip
    (launch,) = launches
    compiled = offline_compile.compile_launch(*launch)
    assert compiled.spill_bytes == 0
    assert compiled.wgmma == compiled.mma == 0
