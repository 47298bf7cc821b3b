"""Numerics of the Triton kernels against their references, in Triton's interpreter.

Run by test_triton.py in a process of its own: TRITON_INTERPRET must be set before triton is imported. Not collected
otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_steps import Step, make_step

from octavo.attention.reference import ReferenceAttention
from octavo.attention.triton import TritonAttention
from octavo.kernels.reference import apply_updates as reference_updates
from octavo.kernels.reference import last_rows as reference_last_rows
from octavo.kernels.reference import prepare as reference_prepare
from octavo.kernels.reference.latent_write import latent_write as reference_latent_write
from octavo.kernels.triton import apply_updates, last_rows, latent_write, prepare, target
from octavo.kernels.triton.paged_decode import plan_decode

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DECODE = [(1, 1), (1, 63), (1, 64), (1, 65), (1, 300)]
MIXED = [(1, 20), (1, 130), (7, 7), (33, 90), (2, 200)]


def compare(step: Step) -> None:
    """Output and cache of both backends."""
    ctx = step.clone_ctx()
    backend = TritonAttention()
    backend.prepare(ctx)
    got = backend.attend(step.spec, step.q_thd, step.k_tgd, step.v_tgd, ctx, step.sink_h)
    want = ReferenceAttention().attend(step.spec, step.q_thd, step.k_tgd, step.v_tgd, step.ctx, step.sink_h)
    assert torch.equal(ctx.kv_cache[0].nan_to_num(7), step.ctx.kv_cache[0].nan_to_num(7))
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[got.dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_attention(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    compare(make_step(rows, block_size=64, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 16, 24, 128])
def test_attention_block_sizes(block_size: int) -> None:
    compare(make_step(MIXED, block_size=block_size, dim=32))


@pytest.mark.parametrize("dim", [8, 80, 96, 128, 256])
def test_attention_head_dims(dim: int) -> None:
    compare(make_step([(1, 90), (9, 70)], block_size=64, dim=dim))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (9, 3), (8, 1), (20, 1), (7, 1)])
def test_attention_groups(heads: int, kv_heads: int) -> None:
    compare(make_step([(1, 90), (1, 300), (40, 70)], block_size=64, dim=32, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 8.0), (1, 0.0), (5, 8.0), (64, 0.0), (70, 8.0), (10_000, 0.0)])
def test_attention_windows_and_caps(window: int, soft_cap: float) -> None:
    compare(make_step([*MIXED, (80, 210)], block_size=32, dim=16, window=window, soft_cap=soft_cap))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_sinks(window: int, dtype: torch.dtype) -> None:
    rows = [*MIXED, (1, 700)]
    step = make_step(rows, block_size=64, heads=8, kv_heads=2, window=window, dtype=dtype, has_sinks=True)
    compare(step)
    without = ReferenceAttention().attend_cached(step.spec, step.q_thd, step.ctx)
    assert (
        without - ReferenceAttention().attend_cached(step.spec, step.q_thd, step.ctx, step.sink_h)
    ).abs().max() > 0.05


@pytest.mark.parametrize("chunk", [1, 16, 50, 1000])
def test_attention_in_chunks(chunk: int) -> None:
    compare(make_step([*MIXED, (80, 210), (1, 700)], block_size=32, dim=16, chunk=chunk))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(4, 40, 24), (16, 80, 64), (20, 48, 32)])
def test_attention_over_latents(heads: int, dim: int, value_dim: int, dtype: torch.dtype) -> None:
    rows = [*MIXED, (1, 900)]
    compare(make_step(rows, block_size=64, heads=heads, kv_heads=1, dim=dim, value_dim=value_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [{"dim": 24}, {"dim": 128}, {"dim": 200}, {"dim": 80, "value_dim": 64, "heads": 20}])
def test_attention_on_small_devices(sizes: dict[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of devices with less shared memory."""
    monkeypatch.setattr(target, "capability", lambda device: (8, 9))
    kv_heads = 1 if "value_dim" in sizes else 2
    compare(make_step([*MIXED, (40, 130)], block_size=64, kv_heads=kv_heads, dtype=dtype, **sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_latent_write(is_interleaved: bool, dtype: torch.dtype) -> None:
    """Slices of products, in odd sizes."""
    torch.manual_seed(0)
    tokens, heads, plain, latent_dim, rotated = 7, 5, 12, 40, 24
    down = torch.randn(tokens, 9 + latent_dim + rotated).to(dtype)
    latent_tl, key_tr = down[:, 9 : 9 + latent_dim], down[:, 9 + latent_dim :]
    query_thr = torch.randn(tokens, heads, plain + rotated).to(dtype)[..., plain:]
    cos_sin_tr, gain_l = torch.rand(tokens, rotated), torch.rand(latent_dim).to(dtype)
    place_t = torch.tensor([5, 33, 34, 17, 63, 16, 48])
    results = []
    for write in (latent_write.latent_write, reference_latent_write):
        cache = torch.full((4, 1, 1, 16, latent_dim + rotated), 7.0, dtype=dtype)
        q_thd = torch.full((tokens, heads, latent_dim + rotated), 7.0, dtype=dtype)
        write(
            query_thr, latent_tl, key_tr, cos_sin_tr, gain_l, cache, place_t, q_thd,
            eps=1e-6, is_interleaved=is_interleaved,
        )  # fmt: skip
        results.append((q_thd, cache))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype] / 2, atol=TOLERANCE[dtype])
        assert (want == 7.0).any()
        assert torch.equal(got == 7.0, want == 7.0)


def test_attention_of_views() -> None:
    step = make_step(MIXED, block_size=64)
    fused = torch.cat([x.flatten(1) for x in (step.q_thd, step.k_tgd, step.v_tgd)], 1)
    q, k, v = (x.unflatten(1, (-1, 64)) for x in fused.split([4 * 64, 2 * 64, 2 * 64], 1))
    compare(replace(step, q_thd=q, k_tgd=k, v_tgd=v))
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (step.q_thd, step.k_tgd, step.v_tgd))
    compare(replace(step, q_thd=q, k_tgd=k, v_tgd=v))


def test_padding_rows_are_harmless() -> None:
    """Rows of the null slot (kv length 1, null block) change nothing of the others and give finite numbers."""
    step = make_step(DECODE, block_size=64)
    alone, padded = step.clone_ctx(), step.clone_ctx()
    backend = TritonAttention()
    backend.prepare(alone)
    want = backend.attend(step.spec, step.q_thd, step.k_tgd, step.v_tgd, alone)
    used = set(step.ctx.row_slot_r.tolist())
    null_slot = next(s for s in range(step.ctx.block_table_sb.shape[0]) if s not in used)
    pad = torch.ones(3, dtype=torch.int32)
    padded.row_slot_r = torch.cat([padded.row_slot_r, pad * null_slot])
    padded.kv_len_r = torch.cat([padded.kv_len_r, pad])
    padded.query_start_r = torch.arange(len(DECODE) + 4, dtype=torch.int32)
    padded.slot_mapping_t = torch.cat([padded.slot_mapping_t, pad.long() * 0])
    padded.num_rows = padded.num_decode_rows = padded.num_tokens = len(DECODE) + 3
    padded.max_kv_len = 4096
    q, k, v = (torch.cat([x, x[:3]]) for x in (step.q_thd, step.k_tgd, step.v_tgd))
    backend.prepare(padded)
    got = backend.attend(step.spec, q, k, v, padded)
    torch.testing.assert_close(got[: len(DECODE)], want, rtol=0, atol=1e-6)
    assert got.isfinite().all()
    assert torch.equal(padded.kv_cache[0][1:].nan_to_num(7), alone.kv_cache[0][1:].nan_to_num(7))


@pytest.mark.parametrize("rows", [MIXED, [(1, 20), (1, 130)], [(7, 7), (33, 90)]], ids=["mixed", "decode", "prompts"])
def test_counts_may_be_known_to_the_device_only(rows: list[tuple[int, int]]) -> None:
    """More rows and tokens than there are, as a captured graph has them: the others' places get zeros."""
    step = make_step(rows, block_size=64)
    alone, bounded = step.clone_ctx(), step.clone_ctx()
    backend = TritonAttention()
    backend.prepare(alone)
    want = backend.attend(step.spec, step.q_thd, step.k_tgd, step.v_tgd, alone)
    count, tokens, padding = len(rows), alone.num_tokens, torch.zeros(9, 4, 64)
    bounded.num_decode_rows_1 = torch.tensor([alone.num_decode_rows], dtype=torch.int32)
    bounded.num_rows, bounded.num_decode_rows, bounded.num_tokens = 9, 4, tokens + 9
    bounded.row_slot_r = torch.cat([alone.row_slot_r, alone.row_slot_r.new_zeros(9 - count)])
    bounded.kv_len_r = torch.cat([alone.kv_len_r, alone.kv_len_r.new_ones(9 - count)])
    bounded.query_start_r = torch.cat([alone.query_start_r, alone.query_start_r.new_full((9 - count,), tokens)])
    bounded.slot_mapping_t = torch.cat([alone.slot_mapping_t, alone.slot_mapping_t.new_zeros(9)])
    bounded.max_query_len, bounded.max_kv_len = tokens + 9, 4096
    backend.prepare(bounded)
    q, k, v = (torch.cat([x, padding[:, : x.shape[1]]]) for x in (step.q_thd, step.k_tgd, step.v_tgd))
    got = backend.attend(step.spec, q, k, v, bounded)
    torch.testing.assert_close(got[:tokens], want, rtol=0, atol=1e-6)
    assert not got[tokens:].any()


def test_tokens_of_no_row_get_zeros() -> None:
    step = make_step([(5, 9)])
    q = torch.cat([step.q_thd, step.q_thd])
    ctx = step.clone_ctx()
    got = TritonAttention().attend(step.spec, q, step.k_tgd, step.v_tgd, ctx)
    assert got[:5].abs().min() > 0
    assert got[5:].eq(0).all()


def test_every_split_count_is_exercised() -> None:
    """The decode tests above launch with 1 split and with several, rows using fewer splits than the launch has."""
    plans = [plan_decode(5, heads, heads // 2, 64, 4, 300).splits for heads in (4, 400)]
    assert plans[0] > 1
    assert plans[1] == 1


def random_arena(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """(token ids with some -1, positions, slots, starts, 3 tables, last tokens): rows of 1 to 40 tokens, 7 padding."""
    lengths = torch.randint(1, 40, (rows,), generator=generator)
    starts = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    tokens = int(starts[-1]) + 7
    ids = torch.randint(-1, 3, (tokens,), generator=generator, dtype=torch.int32)
    position = torch.randint(0, 100, (tokens,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(rows + 2, generator=generator)[:rows].int()
    table = torch.randint(0, 1000, (3, rows + 2, 12), generator=generator, dtype=torch.int32)
    last = torch.randint(100, 200, (rows + 2,), generator=generator)
    return ids, position, slots, starts, table, last


@pytest.mark.parametrize("rows", [1, 2, 31, 64])
def test_prepare_step(rows: int) -> None:
    arena = random_arena(rows, torch.Generator().manual_seed(rows))
    got = prepare.prepare_step(*arena, block_size=9)
    want = reference_prepare.prepare_step(*arena, block_size=9)
    for mine, reference in zip(got, want, strict=True):
        assert mine.dtype == torch.int64
        assert torch.equal(mine, reference)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 4), (5, 8), (0, 2)])
def test_gather_last_rows(count: int, size: int) -> None:
    generator = torch.Generator().manual_seed(count)
    _, _, slots, starts, _, _ = random_arena(6, generator)
    lengths = torch.randint(1, 99, (6,), generator=generator, dtype=torch.int32)
    hidden = torch.randn(int(starts[-1]), 24, generator=generator)
    results = []
    for module in (last_rows, reference_last_rows):
        out = reference_last_rows.SampledInputs(
            torch.zeros(size, 24), torch.zeros(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)
        )
        module.gather_last_rows(hidden, starts, slots, lengths, out, count=count, null_slot=77)
        results.append(out)
        again = reference_last_rows.SampledInputs(*(torch.full_like(part, 5) for part in out))
        on_device = torch.tensor([count], dtype=torch.int32)
        module.gather_last_rows(hidden, starts, slots, lengths, again, count=on_device, null_slot=77)
        assert all(one.equal(other) for one, other in zip(out, again, strict=True))
    got, want = results
    assert got.hidden_sm[:count].equal(hidden[starts[1 : count + 1].long() - 1])
    assert got.slot_s.tolist() == [*slots[:count].tolist(), *[77] * (size - count)]
    assert all(mine.equal(theirs) for mine, theirs in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("updates", [0, 3, 300])
def test_apply_updates(updates: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(updates)
    table = torch.zeros(30, 40, dtype=torch.int32)
    place = torch.randperm(table.numel(), generator=generator)[:updates].int()
    block = torch.randint(1, 99, (updates,), generator=generator, dtype=torch.int32)
    update = torch.stack([place // 40, place % 40, block], 1)
    caches = [torch.randn(9, 2, 3, 5, 14, generator=generator).to(dtype) for _ in range(2)]
    copies = torch.randperm(9, generator=generator)[: 2 * (updates % 4)].reshape(-1, 2).int()
    want_table, want_caches = table.clone(), [cache.clone() for cache in caches]
    reference_updates.apply_updates(want_table, update, want_caches, copies)
    apply_updates.apply_updates(table, update, caches, copies)
    assert torch.equal(table, want_table)
    for cache, want in zip(caches, want_caches, strict=True):
        assert torch.equal(cache, want)
