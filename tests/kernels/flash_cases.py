"""The FlashAttention backend against the reference, with a stand-in for the package that does what its documentation
says; decode rows run in Triton's interpreter. Run by test_flash.py in a process of its own."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from paged_steps import make_step
from torch import Tensor

from octavo.attention.base import make_backend

calls: list[int] = []


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    num_splits: int,
) -> Tensor:
    """Keys [page, place, head, dim]; a row's last query sees its last key; window_size counts keys to the left."""
    assert causal
    assert num_splits == 1
    assert cache_seqlens.dtype == page_table.dtype == cu_seqlens_q.dtype == torch.int32
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    calls.append(len(cache_seqlens))
    for row, length in enumerate(cache_seqlens.tolist()):
        first, last = cu_seqlens_q[row : row + 2].tolist()
        assert 0 < last - first <= max_seqlen_q
        pages = page_table[row, : -(-length // k_cache.shape[1])].long()
        k, v = (side[pages].flatten(0, 1)[:length].float() for side in (k_cache, v_cache))
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        position = torch.arange(length - (last - first), length)
        key = torch.arange(length)
        seen = key[None] <= position[:, None]
        if window_size[0] >= 0:
            seen &= key[None] >= position[:, None] - window_size[0]
        score = torch.einsum("qhd,khd->hqk", q[first:last].float(), k) * softmax_scale
        weight = score.masked_fill(~seen, -torch.inf).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weight, v).to(q.dtype)
    return out


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    calls.clear()


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("rows", [[(1, 9), (1, 70), (33, 100), (16, 16)], [(50, 50), (2, 90)], [(1, 5)]])
def test_agrees_with_the_reference(rows: list[tuple[int, int]], window: int) -> None:
    step = make_step(rows, window=window, dtype=torch.float16)
    inputs = step.spec, step.q_thd, step.k_tgd, step.v_tgd
    expected = make_backend("reference").attend(*inputs, step.clone_ctx())
    backend = make_backend("flash")
    ctx = step.clone_ctx()
    for _ in range(2):  # what the first layer left is of use to the second
        torch.testing.assert_close(backend.attend(*inputs, ctx), expected, rtol=5e-3, atol=5e-3)
    prompts = sum(queries > 1 for queries, _ in rows)
    assert calls == ([prompts] * 2 if prompts else [])


def test_layers_that_it_does_not_fit_go_to_the_own_kernel() -> None:
    for options in ({"soft_cap": 20.0}, {"dim": 32}):
        step = make_step([(1, 9), (33, 100)], dtype=torch.float16, **options)
        inputs = step.spec, step.q_thd, step.k_tgd, step.v_tgd
        expected = make_backend("reference").attend(*inputs, step.clone_ctx())
        actual = make_backend("flash").attend(*inputs, step.clone_ctx())
        torch.testing.assert_close(actual, expected, rtol=5e-3, atol=5e-3)
    assert not calls
