"""The references themselves, against torch's SDPA and hand-made cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_steps import make_step

from octavo.attention.reference import ReferenceAttention
from octavo.kernels.reference.apply_updates import apply_updates
from octavo.kernels.reference.prepare import prepare_step


@pytest.mark.parametrize("window", [0, 5])
def test_whole_prompt_equals_sdpa(window: int) -> None:
    step = make_step([(37, 37)], heads=6, kv_heads=2, dim=32, window=window)
    got = ReferenceAttention().attend(step.spec, step.q_thd, step.k_tgd, step.v_tgd, step.ctx)
    place = torch.arange(37)
    visible = place[None, :] <= place[:, None]
    if window:
        visible &= place[None, :] > place[:, None] - window
    q, k, v = (x.transpose(0, 1)[None] for x in (step.q_thd, step.k_tgd, step.v_tgd))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    torch.testing.assert_close(got, want[0].transpose(0, 1))


def test_chunks_equal_the_whole() -> None:
    """A prompt in three chunks gives what it gives at once."""
    whole = make_step([(40, 40)], window=9, soft_cap=3.0)
    want = ReferenceAttention().attend(whole.spec, whole.q_thd, whole.k_tgd, whole.v_tgd, whole.ctx)
    chunked = whole.clone_ctx()
    parts = []
    for low, high in [(0, 17), (17, 18), (18, 40)]:
        chunked.query_start_r = torch.tensor([0, high - low], dtype=torch.int32)
        chunked.kv_len_r = torch.tensor([high], dtype=torch.int32)
        chunked.slot_mapping_t = whole.ctx.slot_mapping_t[low:high]
        inputs = (x[low:high] for x in (whole.q_thd, whole.k_tgd, whole.v_tgd))
        parts.append(ReferenceAttention().attend(whole.spec, *inputs, chunked))
    torch.testing.assert_close(torch.cat(parts), want)


def test_soft_cap_bounds_scores() -> None:
    """With a tiny cap all visible keys weigh nearly the same."""
    step = make_step([(1, 20)], soft_cap=1e-4)
    got = ReferenceAttention().attend(step.spec, step.q_thd, step.k_tgd, step.v_tgd, step.ctx)
    blocks = step.ctx.block_table_sb[int(step.ctx.row_slot_r[0])].long()
    values = step.ctx.kv_cache[0][blocks, 1].permute(1, 0, 2, 3).flatten(1, 2)[:, :20]
    torch.testing.assert_close(got[0], values.mean(1).repeat_interleave(2, 0), rtol=1e-3, atol=1e-3)


def test_a_sink_is_a_key_without_a_value() -> None:
    step = make_step([(1, 20)], heads=2, kv_heads=2, has_sinks=True)
    got = ReferenceAttention().attend(step.spec, step.q_thd, step.k_tgd, step.v_tgd, step.ctx, step.sink_h)
    blocks = step.ctx.block_table_sb[int(step.ctx.row_slot_r[0])].long()
    k, v = step.ctx.kv_cache[0][blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :20]
    scores = torch.cat(((k @ step.q_thd[0, :, :, None])[..., 0] * step.spec.scale, step.sink_h[:, None]), 1)
    values = torch.cat((v, torch.zeros(2, 1, 64)), 1)
    torch.testing.assert_close(got[0], (scores.softmax(-1)[:, None] @ values)[:, 0])


def test_chunks_and_latents_equal_plain_attention() -> None:
    """Within its chunk a token sees what a short sequence's does; latents are keys, and values in part."""
    step = make_step([(1, 40)], chunk=16)
    got = ReferenceAttention().attend(step.spec, step.q_thd, step.k_tgd, step.v_tgd, step.ctx)
    window = replace(step.spec, chunk=0, window=40 - 32)
    torch.testing.assert_close(got, ReferenceAttention().attend_cached(window, step.q_thd, step.ctx))
    step = make_step([(3, 40)], heads=4, kv_heads=1, dim=24, value_dim=16)
    got = ReferenceAttention().attend(step.spec, step.q_thd, step.k_tgd, step.k_tgd, step.ctx)
    both = replace(step.spec, value_dim=0)
    step.ctx.kv_cache = [step.ctx.kv_cache[0].expand(-1, 2, -1, -1, -1)]
    want = ReferenceAttention().attend_cached(both, step.q_thd, step.ctx)
    torch.testing.assert_close(got, want[..., :16])


def test_prepare_step() -> None:
    table = torch.tensor([[0, 0, 0], [7, 3, 0], [5, 0, 0]], dtype=torch.int32)
    got = prepare_step(
        torch.tensor([-1, 11, 12, 13, -1], dtype=torch.int32),
        torch.tensor([5, 2, 3, 4, 9], dtype=torch.int32),
        torch.tensor([1, 2], dtype=torch.int32),
        torch.tensor([0, 1, 4], dtype=torch.int32),
        torch.stack([table, table + 1]),
        torch.tensor([100, 101, 102]),
        block_size=4,
    )
    assert got.token_id_t.tolist() == [101, 11, 12, 13, 0]
    assert got.position_t.tolist() == [5, 2, 3, 4, 0]
    assert got.slot_mapping_gt.tolist() == [
        [3 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 0 * 4 + 0, 0],
        [4 * 4 + 1, 6 * 4 + 2, 6 * 4 + 3, 1 * 4 + 0, 0],
    ]
    assert {x.dtype for x in got} == {torch.int64}


def test_apply_updates() -> None:
    table = torch.zeros(3, 4, dtype=torch.int32)
    caches = [torch.randn(6, 2, 1, 2, 3) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    updates = torch.tensor([[2, 1, 5], [0, 3, 4]], dtype=torch.int32)
    apply_updates(table, updates, caches, torch.tensor([[1, 5], [1, 4]], dtype=torch.int32))
    assert table.tolist() == [[0, 0, 0, 4], [0, 0, 0, 0], [0, 5, 0, 0]]
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[5], old[1])
        assert torch.equal(cache[4], old[1])
        assert torch.equal(cache[:4], old[:4])
