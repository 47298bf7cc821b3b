"""The FlashInfer backend against the reference, with a stand-in for the package that does what its documentation says;
decode rows run in Triton's interpreter. Run by test_flash.py in a process of its own."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from paged_steps import make_step
from torch import Tensor

from octavo.attention.base import make_backend

calls: list[str] = []


class Wrapper:
    """Keys and values of a page [2, head, place, dim] (layout HND); a row's last query sees its last key."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        calls.append("plan")
        pages = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all(tensor.dtype == torch.int32 for tensor in pages)
        assert causal
        self.pages = [tensor.tolist() for tensor in pages]
        self.heads = num_qo_heads, num_kv_heads, head_dim_qk
        self.page_size, self.scale, self.window, self.cap = page_size, sm_scale, window_left, logits_soft_cap
        self.dtypes = q_data_type, kv_data_type

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        calls.append("run")
        assert (q.dtype, paged_kv_cache.dtype) == self.dtypes
        assert paged_kv_cache.shape[1:] == (2, self.heads[1], self.page_size, self.heads[2])
        starts, ends, blocks, last = self.pages
        out = torch.empty_like(q)
        for row, places in enumerate(last):
            mine = blocks[ends[row] : ends[row + 1]]
            length = (len(mine) - 1) * self.page_size + places
            k, v = (paged_kv_cache[mine, side].transpose(1, 2).flatten(0, 1)[:length].float() for side in (0, 1))
            k, v = (x.repeat_interleave(self.heads[0] // self.heads[1], 1) for x in (k, v))
            first, end = starts[row : row + 2]
            key, position = torch.arange(length), torch.arange(length - (end - first), length)
            seen = key[None] <= position[:, None]
            if self.window >= 0:
                seen &= key[None] >= position[:, None] - self.window
            score = torch.einsum("qhd,khd->hqk", q[first:end].float(), k) * self.scale
            if self.cap is not None:
                score = self.cap * torch.tanh(score / self.cap)
            weight = score.masked_fill(~seen, -torch.inf).softmax(-1)
            out[first:end] = torch.einsum("hqk,khd->qhd", weight, v).to(q.dtype)
        return out


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    calls.clear()


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"soft_cap": 20.0}])
@pytest.mark.parametrize("rows", [[(1, 9), (1, 70), (33, 100), (16, 16)], [(50, 50), (2, 90)], [(1, 5)]])
def test_agrees_with_the_reference(rows: list[tuple[int, int]], options: dict[str, Any]) -> None:
    step = make_step(rows, dtype=torch.float16, **options)
    inputs = step.spec, step.q_thd, step.k_tgd, step.v_tgd
    expected = make_backend("reference").attend(*inputs, step.clone_ctx())
    backend = make_backend("flashinfer")
    for _ in range(2):
        ctx = step.clone_ctx()
        backend.prepare(ctx)
        for _ in range(2):  # the second layer needs no plan of its own
            torch.testing.assert_close(backend.attend(*inputs, ctx), expected, rtol=5e-3, atol=5e-3)
    prompts = any(queries > 1 for queries, _ in rows)
    assert calls == (["plan", "run", "run"] * 2 if prompts else [])


def test_layers_that_it_does_not_fit_go_to_the_own_kernel() -> None:
    step = make_step([(1, 9), (33, 100)], dtype=torch.float16, dim=32)
    inputs = step.spec, step.q_thd, step.k_tgd, step.v_tgd
    expected = make_backend("reference").attend(*inputs, step.clone_ctx())
    actual = make_backend("flashinfer").attend(*inputs, step.clone_ctx())
    torch.testing.assert_close(actual, expected, rtol=5e-3, atol=5e-3)
    assert not calls
