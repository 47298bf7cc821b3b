"""The kernels between a layer's products (norms, activation, rotation with KV write) against their references, and
layers that use them against the plain ones, in Triton's interpreter.

Run by test_joins.py in a process of its own: TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import gated as reference_gated
from octavo.kernels.reference import rms_norm as reference_norm
from octavo.kernels.reference import rotate_write as reference_rotate
from octavo.kernels.reference import weighed_sum as reference_weighed
from octavo.kernels.triton import gated, rms_norm, rotate_write, weighed_sum

DTYPES = (torch.float32, torch.float16)
GAINS = [(dtype, dtype) for dtype in DTYPES] + [(torch.float16, torch.float32)]
"""Types of rows and of norms' gains."""
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
"""Of numbers around 1; fp16 may round to the other neighbour where sums are taken in another order."""
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[actual.dtype], atol=TOLERANCE[actual.dtype])


@pytest.mark.parametrize(("dtype", "gain_dtype"), GAINS)
@pytest.mark.parametrize("shape", [(1, 64), (5, 96), (3, 4096), (0, 64)])
def test_norms(shape: tuple[int, int], dtype: torch.dtype, gain_dtype: torch.dtype) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    gain = 1 + 0.3 * random(shape[1], dtype=gain_dtype)
    before = x.clone()
    close(rms_norm.rms_norm(x, gain, EPS), reference_norm.rms_norm(x, gain, EPS))
    assert torch.equal(x, before)
    want_normed, want_total = reference_norm.add_rms_norm(x, residual, gain, EPS)
    normed, total = rms_norm.add_rms_norm(x, residual, gain, EPS)
    assert torch.equal(total, want_total)
    close(normed, want_normed)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_norm_of_a_sum_of_parts(parts: int) -> None:
    x, residual = random(parts, 5, 96, dtype=torch.float32), random(5, 96, dtype=torch.float16)
    gain = 1 + 0.3 * random(96, dtype=torch.float16)
    want_normed, want_total = reference_norm.add_rms_norm(x.sum(0).half(), residual.clone(), gain, EPS)
    normed, total = rms_norm.add_parts_rms_norm(x, residual, gain, EPS)
    close(total, want_total)
    close(normed, want_normed)


def test_norm_of_a_tiny_row_is_bounded_by_eps() -> None:
    x = torch.full((1, 64), 1e-4)
    close(rms_norm.rms_norm(x, torch.ones(64), 1.0), x / (1 + 1e-8) ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "features"), [(1, 64), (3, 96), (2, 2048), (2, 2100), (0, 64)])
def test_gated_silu(tokens: int, features: int, dtype: torch.dtype) -> None:
    product = 3 * random(tokens, 2 * features, dtype=dtype)
    close(gated.gated_silu(product), reference_gated.gated_silu(product))
    close(gated.gated_gelu(product), reference_gated.gated_gelu(product))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 64), (3, 100), (2, 2100), (0, 64)])
def test_weighed_sum(tokens: int, dim: int, dtype: torch.dtype) -> None:
    hidden, shared, sparse = (random(tokens, dim, dtype=dtype, seed=seed) for seed in range(3))
    gate = 0.3 * random(1, dim, dtype=dtype, seed=3)
    close(
        weighed_sum.weighed_sum(hidden, gate, shared, sparse),
        reference_weighed.weighed_sum(hidden, gate, shared, sparse),
    )


HEADS = {"gqa": (8, 2, 64), "mha": (3, 3, 32), "group-of-7": (7, 1, 64), "dim-80": (4, 2, 80), "dim-128": (2, 1, 128)}
"""(query heads, KV heads, head dim)"""


@pytest.mark.parametrize(("dtype", "gain_dtype"), GAINS)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("heads", "part"), [*((name, 1.0) for name in HEADS), ("gqa", 0.25), ("dim-80", 0.4)])
def test_rotate_write(heads: str, part: float, has_norm: bool, dtype: torch.dtype, gain_dtype: torch.dtype) -> None:
    num_heads, kv_heads, dim = HEADS[heads]
    tokens, block_size, blocks, width = 9, 16, 5, (num_heads + 2 * kv_heads) * dim
    qkv = random(tokens, width + 24, dtype=dtype)[:, :width]  # gates of heads come after
    angle = random(tokens, int(dim * part) // 2, dtype=torch.float32)
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1)
    places = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(dim))[:tokens]
    gains = [1 + 0.3 * random(dim, dtype=gain_dtype, seed=i) if has_norm else None for i in range(2)]
    want_cache = random(blocks, 2, kv_heads, block_size, dim, dtype=dtype)
    cache = want_cache.clone()
    options = {"num_heads": num_heads, "norm_eps": EPS}
    want = reference_rotate.rotate_write(qkv, cos_sin, want_cache, places, *gains, **options)
    q = rotate_write.rotate_write(qkv, cos_sin, cache, places, *gains, **options)
    assert q.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    close(q, want)
    close(cache, want_cache)
    values = qkv.unflatten(1, (-1, dim))[:, num_heads + kv_heads :]
    assert torch.equal(cache[places // block_size, 1, :, places % block_size], values)
