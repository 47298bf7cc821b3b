"""Batch-invariant products and attention in Triton's interpreter; run by test_invariant.py in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_steps import make_step

from octavo.attention.base import make_backend
from octavo.kernels.reference.invariant_gemm import invariant_product as reference
from octavo.kernels.reference.invariant_heads import invariant_heads as reference_heads
from octavo.kernels.triton import invariant_gemm
from octavo.kernels.triton.invariant_gemm import invariant_launch, kinds_of_rows
from octavo.kernels.triton.invariant_heads import heads_launch
from octavo.kernels.triton.paged_latent import plan_latent


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "n", "k", "bias"), [(1, 40, 96, True), (37, 72, 200, False), (150, 33, 64, True)])
def test_product(rows: int, n: int, k: int, bias: bool, dtype: torch.dtype, tma: bool) -> None:
    x, weight = torch.randn(rows, k).to(dtype), (torch.randn(n, k) * k**-0.5).to(dtype)
    bias_n = torch.randn(n).to(dtype) if bias else None
    for out in (dtype, torch.float32):
        y = torch.full((rows, n), torch.nan, dtype=out)
        invariant_launch(x, weight, bias_n, y, tma=tma).run(pdl=False)
        tolerance = 2e-3 if out == torch.float16 else 2e-5
        torch.testing.assert_close(y, reference(x, weight, bias_n, out), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "heads", "k", "n"), [(1, 3, 24, 72), (70, 2, 130, 40), (65, 1, 64, 64)])
def test_product_of_heads(tokens: int, heads: int, k: int, n: int, dtype: torch.dtype) -> None:
    """Views as latent attention has them: heads cut out of wider rows, a matrix and its transpose, wider outputs."""
    x = torch.randn(tokens, heads, k + 5).to(dtype)[..., :k]
    matrices = (torch.randn(heads, n + k, max(n, k)) * k**-0.5).to(dtype)
    for weight in (matrices[:, :k, :n], matrices[:, k:, :k].transpose(1, 2)):
        whole = torch.full((tokens, heads, n + 7), torch.nan, dtype=dtype)
        expected = torch.empty(tokens, heads, n, dtype=dtype)
        heads_launch(x, weight, whole[..., :n]).run(pdl=False)
        reference_heads(x, weight, expected)
        tolerance = 2e-3 if dtype == torch.float16 else 2e-5
        torch.testing.assert_close(whole[..., :n], expected, rtol=tolerance, atol=tolerance)
        assert whole[..., n:].isnan().all()


def test_latents_are_attended_to_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows are not split, since prompts' rows are not."""
    plans = []

    def seen(*args: Any, **kwargs: Any) -> Any:
        plans.append(kwargs["is_decode"])
        return plan_latent(*args, **kwargs)

    monkeypatch.setattr("octavo.attention.triton.plan_latent", seen)
    step = make_step([(1, 1), (20, 150), (1, 131)], heads=4, kv_heads=1, dim=80, value_dim=64, dtype=torch.float16)
    inputs = step.spec, step.q_thd, step.k_tgd, step.v_tgd
    expected = make_backend("reference").attend(*inputs, step.clone_ctx())
    actual = make_backend("triton", deterministic=True).attend(*inputs, step.clone_ctx())
    torch.testing.assert_close(actual, expected, rtol=5e-3, atol=5e-3)
    assert plans == [False, False]


@pytest.mark.parametrize("window", [0, 50])
def test_attention_takes_one_way_for_all_rows(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows go where prompts' rows go, so that a token's result does not depend on its chunk. That results are
    equal bit by bit is for a device to show (gpu_invariant.py): the interpreter's products depend on shapes."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the decode kernel sums in another order")

    monkeypatch.setattr("octavo.attention.triton.paged_decode", refuse)
    step = make_step([(1, 1), (20, 150), (1, 131)], window=window, dtype=torch.float16)
    backend, reference_backend = make_backend("triton", deterministic=True), make_backend("reference")
    inputs = step.spec, step.q_thd, step.k_tgd, step.v_tgd
    expected = reference_backend.attend(*inputs, step.clone_ctx())
    actual = backend.attend(*inputs, step.clone_ctx())
    torch.testing.assert_close(actual, expected, rtol=5e-3, atol=5e-3)


def test_every_tile_is_compiled_ahead() -> None:
    for item_bytes in (2, 4):
        tiles = {invariant_gemm.choose_tile(rows, item_bytes) for rows in range(1, 1000)}
        assert tiles == {invariant_gemm.choose_tile(rows, item_bytes) for rows in kinds_of_rows(item_bytes)}
