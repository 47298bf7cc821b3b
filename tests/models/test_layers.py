"""Layers alone, against the functions that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from octavo.errors import ModelError
from octavo.layers.activation import ACTIVATIONS, GatedActivation
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear
from octavo.layers.norm import NormSpec, RMSNorm

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_rounds_like_transformers(dtype: torch.dtype) -> None:
    norm, reference = RMSNorm(48, NormSpec(1e-5), dtype=dtype, device=CPU), LlamaRMSNorm(48, eps=1e-5).to(dtype)
    weight = torch.randn(48).to(dtype)
    norm.weight.copy_(weight)
    reference.weight.data.copy_(weight)
    x, residual = (torch.randn(300, 48).mul(5).to(dtype) for _ in range(2))
    normed, total = norm.add_norm(x, residual)
    assert torch.equal(total, x + residual)
    exact = dtype != torch.float32
    torch.testing.assert_close(norm(x), reference(x), atol=0 if exact else 1e-6, rtol=0 if exact else 1e-6)
    torch.testing.assert_close(normed, reference(total), atol=0 if exact else 1e-6, rtol=0 if exact else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shifted_norm_rounds_like_transformers(dtype: torch.dtype) -> None:
    """Gemma's weights are small numbers, which 1 + w in bfloat16 would lose."""
    norm = RMSNorm(48, NormSpec(1e-5, shift=1.0), dtype=dtype, device=CPU)
    reference = Gemma2RMSNorm(48, eps=1e-5).to(dtype)
    weight = torch.randn(48).mul(0.01).to(dtype)
    norm.slots("norm")["norm.weight"].copy_(weight)
    norm.finish()
    reference.weight.data.copy_(weight)
    x = torch.randn(300, 48).mul(5).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(norm(x), reference(x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("bias", [True, False])
def test_stacked_linear(bias: bool) -> None:
    sizes = {"a": 6, "b": 2, "c": 3}
    layer = Linear(5, sizes, bias=bias, dtype=torch.float32, device=CPU)
    parts = {name: (torch.randn(size, 5), torch.randn(size) if bias else None) for name, size in sizes.items()}
    slots = layer.slots()
    assert len(slots) == (6 if bias else 3)
    for name, (weight, bias_o) in parts.items():
        slots[f"{name}.weight"].copy_(weight)
        if bias_o is not None:
            slots[f"{name}.bias"].copy_(bias_o)
    x = torch.randn(4, 5)
    expected = torch.cat([F.linear(x, *part) for part in parts.values()], -1)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activation(name: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.randn(7, 20)
    torch.testing.assert_close(GatedActivation(name)(x), ACT2FN[name](x[:, :10]) * x[:, 10:])


def test_unknown_activation() -> None:
    with pytest.raises(ModelError, match="hidden_act 'sine' is not one of silu"):
        GatedActivation("sine")


def test_logits_are_fp32_of_the_weights_product() -> None:
    table = Embedding(30, 16, dtype=torch.bfloat16, device=CPU)
    table.weight.normal_()
    hidden = table(torch.tensor([3, 4], dtype=torch.int32))
    assert torch.equal(hidden, table.weight[3:5])
    assert torch.equal(table.logits(hidden), (hidden @ table.weight.T).float())
