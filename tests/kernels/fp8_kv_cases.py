"""Paged attention over an e4m3 cache in Triton's interpreter; run by test_fp8_kv.py in a process of its own.

The interpreter rounds wrongly to e4m3 (reading is right), so the cache is written by the reference; what a device
writes: gpu_fp8_kv.py.
"""

from __future__ import annotations

import pytest
import torch
from fused_stand_in import run
from fused_steps import make_attention, relative_error
from paged_steps import make_step

from octavo.attention.base import make_backend
from octavo.kernels.reference.kv_write import kept, write_kv
from octavo.kernels.reference.quantize_rows import FP8
from octavo.kernels.triton.decode_attention_launches import AttentionScratch, HeadShape, attend


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("window", [0, 50])
def test_paged_attention(window: int, dtype: torch.dtype) -> None:
    step = make_step([(1, 1), (1, 200), (33, 100), (16, 16)], window=window, dtype=dtype)
    cache = kept(step.ctx.kv_cache[0], FP8)
    write_kv(step.k_tgd, step.v_tgd, cache, step.ctx.slot_mapping_t)
    step.ctx.kv_cache = [cache]
    wide = step.clone_ctx()
    wide.kv_cache = [cache.to(dtype)]
    expected = make_backend("reference").attend_cached(step.spec, step.q_thd, wide)
    for name in ("reference", "triton"):
        actual = make_backend(name).attend_cached(step.spec, step.q_thd, step.ctx)
        torch.testing.assert_close(actual, expected, rtol=5e-3, atol=5e-3)


def test_numbers_beyond_e4m3_saturate() -> None:
    x = torch.tensor([1.0, 1000.0, -1e30, 448.0, 460.0])
    assert kept(x, FP8).float().tolist() == [1.0, 448.0, -448.0, 448.0, 448.0]


@pytest.mark.parametrize("lengths", [[1, 64, 65, 200], [700]])
def test_fused_decode_attention(lengths: list[int]) -> None:
    """What it writes is one place a row, of which attention sees little."""
    heads = HeadShape(8, 2, 64)
    case = make_attention(lengths, heads, dtype=torch.float32, seed=3)
    cache = kept(case.kv_cache, FP8)
    expected_cache = cache.clone()
    out = torch.full((len(lengths), 8 * 64), torch.nan)
    scratch = AttentionScratch.allocate(heads, len(lengths), torch.device("cpu"))
    for launch in attend(case.layer, case.qkv_ro, cache, case.rows, scratch, out):
        run(launch)
    expected = case.expected(expected_cache)
    long = [i for i, length in enumerate(lengths) if length > 1]
    assert relative_error(out[long], expected[long]) < 0.02
    assert relative_error(cache.float(), expected_cache.float()) < 0.02
