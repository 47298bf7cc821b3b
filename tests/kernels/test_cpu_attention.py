"""The Rust attention through `CpuAttention`, against the reference backend. (Shapes are swept in rust/cpu/tests.)"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_steps import Step, make_step

from octavo._core import cpu_features
from octavo.attention.base import make_backend
from octavo.attention.reference import ReferenceAttention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def run(name: str, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and cache after the step."""
    ctx = step.clone_ctx()
    backend = make_backend(name, num_threads=2)
    backend.prepare(ctx)
    return backend.attend(step.spec, step.q_thd, step.k_tgd, step.v_tgd, ctx), ctx.kv_cache[0]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (11, 0.0), (0, 5.0), (40, 20.0)])
def test_equals_reference(dtype: torch.dtype, window: int, soft_cap: float) -> None:
    rows = [(1, 1), (1, 17), (1, 300), (7, 7), (33, 90), (64, 64), (2, 16)]
    step = make_step(rows, heads=6, kv_heads=2, dim=64, dtype=dtype, window=window, soft_cap=soft_cap)
    got, got_cache = run("cpu", step)
    want, want_cache = run("reference", step)
    assert torch.equal(got_cache.nan_to_num(7), want_cache.nan_to_num(7))
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(4, 4, 20, 16), (8, 1, 96, 64), (3, 3, 8, 1)])
def test_shapes(heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    step = make_step([(1, 70), (20, 50)], heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)
    torch.testing.assert_close(run("cpu", step)[0], run("reference", step)[0], rtol=0, atol=2e-5)


def test_views_of_a_fused_projection() -> None:
    """q, k and v may be slices of one [t, (h + 2g) * d] projection."""
    step = make_step([(1, 30), (9, 40)])
    fused = torch.cat([x.flatten(1) for x in (step.q_thd, step.k_tgd, step.v_tgd)], 1)
    q, k, v = (x.unflatten(1, (-1, 64)) for x in fused.split([4 * 64, 2 * 64, 2 * 64], 1))
    assert not q.is_contiguous()
    views = replace(step, q_thd=q, k_tgd=k, v_tgd=v)
    torch.testing.assert_close(run("cpu", views)[0], run("reference", step)[0], rtol=0, atol=2e-5)


def test_transposed_views() -> None:
    """q, k and v may be [h, t, d] in memory, as in Transformers' attention."""
    step = make_step([(1, 30), (9, 40)])
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (step.q_thd, step.k_tgd, step.v_tgd))
    views = replace(step, q_thd=q, k_tgd=k, v_tgd=v)
    torch.testing.assert_close(run("cpu", views)[0], run("reference", step)[0], rtol=0, atol=2e-5)


def test_wrong_tensors_are_refused() -> None:
    step = make_step([(1, 30), (9, 40)])
    table = step.ctx.block_table_sb.clone()
    table[int(step.ctx.row_slot_r[1]), 1] = 10_000
    wrong = {
        "contiguous": {"block_table_sb": step.ctx.block_table_sb.t().contiguous().t()},
        "torch.int32": {"kv_len_r": step.ctx.kv_len_r.long()},
        "num_rows 3": {"num_rows": 3},
        "block_table": {"block_table_sb": table},
        r"slot_mapping\[0\]": {"slot_mapping_t": step.ctx.slot_mapping_t + 10_000},
        r"kv_len\[0\]": {"kv_len_r": step.ctx.kv_len_r * 100},
        "kv_cache must be": {"block_size": 8},
    }
    for message, fields in wrong.items():
        ctx = step.clone_ctx()
        for name, value in fields.items():
            setattr(ctx, name, value)
        with pytest.raises(ValueError, match=message):
            make_backend("cpu").attend(step.spec, step.q_thd, step.k_tgd, step.v_tgd, ctx)
    with pytest.raises(ValueError, match="q must be"):
        make_backend("cpu").attend(step.spec, step.q_thd.double(), step.k_tgd, step.v_tgd, step.clone_ctx())


def test_chunked_prefill_through_the_cache() -> None:
    """Three chunks and a decode step give what the whole prompt gives."""
    whole = make_step([(41, 41)])
    want = ReferenceAttention().attend(whole.spec, whole.q_thd, whole.k_tgd, whole.v_tgd, whole.clone_ctx())
    ctx = whole.clone_ctx()
    parts = []
    for low, high in [(0, 16), (16, 35), (35, 40), (40, 41)]:
        ctx.query_start_r = torch.tensor([0, high - low], dtype=torch.int32)
        ctx.kv_len_r = torch.tensor([high], dtype=torch.int32)
        ctx.slot_mapping_t = whole.ctx.slot_mapping_t[low:high]
        inputs = (x[low:high] for x in (whole.q_thd, whole.k_tgd, whole.v_tgd))
        parts.append(make_backend("cpu", num_threads=2).attend(whole.spec, *inputs, ctx))
    torch.testing.assert_close(torch.cat(parts), want, rtol=0, atol=2e-5)


def test_features_end_with_portable() -> None:
    assert cpu_features()[-1] == "portable"
