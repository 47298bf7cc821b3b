"""Products of every head with a matrix of its own, whose rows do not depend on the other rows:
y[t, h, n] = sum_k x[t, h, k] W[h, k, n], any number of tokens (latent attention's way into the latents' space, and out
of it).

One tile for all numbers of tokens, and one accumulator over k: a library's batched product chooses both by the sizes.

Shape suffixes: t tokens, h heads, k input features, n output features.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.target import has_dependent_launches

TILE: Final = {"BLOCK_T": 64, "BLOCK_N": 64, "BLOCK_K": 64}
TILE_SINGLE: Final = {"BLOCK_T": 32, "BLOCK_N": 32, "BLOCK_K": 32}
"""Of 4-byte numbers, at full precision."""


@triton.jit(do_not_specialize=["num_tokens"])
def heads_kernel(
    x, weight, y, num_tokens, x_token, y_token,
    x_head: tl.constexpr, weight_head: tl.constexpr, weight_k: tl.constexpr, weight_n: tl.constexpr,
    y_head: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Features of x and y lie side by side, those of W as its strides say."""
    token_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_token = token_t < num_tokens
    x_t = x + token_t.to(tl.int64) * x_token + head * x_head
    weight_n_ = weight + head * weight_head + n * weight_n
    acc_tn = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x_tk = tl.load(x_t[:, None] + k[None, :], mask=is_token[:, None] & (k < K)[None, :], other=0.0)
        inside_kn = (k < K)[:, None] & (n < N)[None, :]
        w_kn = tl.load(weight_n_[None, :] + k[:, None] * weight_k, mask=inside_kn, other=0.0)
        acc_tn = tl.dot(x_tk, w_kn, acc_tn, input_precision="ieee")
    y_tn = y + (token_t.to(tl.int64) * y_token + head * y_head)[:, None] + n[None, :]
    tl.store(y_tn, acc_tn.to(y.dtype.element_ty), mask=is_token[:, None] & (n < N)[None, :])


def heads_launch(x_thk: Tensor, weight_hkn: Tensor, out_thn: Tensor) -> Launch:
    """The product as a launch; see `invariant_heads`."""
    num_tokens, heads, k = x_thk.shape
    n = weight_hkn.shape[2]
    assert x_thk.stride(2) == out_thn.stride(2) == 1, "features lie side by side"
    tile = TILE_SINGLE if x_thk.element_size() == 4 else TILE
    args = {
        "x": x_thk,
        "weight": weight_hkn,
        "y": out_thn,
        "num_tokens": num_tokens,
        "x_token": x_thk.stride(0),
        "y_token": out_thn.stride(0),
    }
    constants = {
        "x_head": x_thk.stride(1),
        "weight_head": weight_hkn.stride(0),
        "weight_k": weight_hkn.stride(1),
        "weight_n": weight_hkn.stride(2),
        "y_head": out_thn.stride(1),
        "N": n,
        "K": k,
        **tile,
    }
    grid = triton.cdiv(num_tokens, tile["BLOCK_T"]), triton.cdiv(n, tile["BLOCK_N"]), heads
    return Launch(heads_kernel, grid, args, constants, num_warps=4, num_stages=3)


def invariant_heads(x_thk: Tensor, weight_hkn: Tensor, out_thn: Tensor) -> None:
    """x [t, h, k] with W [h, k, n] into `out_thn`, on CUDA; all may be views whose features lie side by side (W's as
    they like)."""
    if x_thk.shape[0]:
        heads_launch(x_thk, weight_hkn, out_thn).run(pdl=has_dependent_launches(x_thk.device))
