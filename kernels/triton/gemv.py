"""Matrix times one vector (decode of a single sequence): y[n] = sum_k W[n, k] x[k], with the work around it fused in.

A program owns BLOCK_N rows of W and walks along k. Its first block of weights is on its way to registers before the
wait for the producer of x, so that the memory system never idles between kernels. Weights in e4m3 are widened in
registers (the vector stays as it is); scales of squares apply to partial sums. More than one vector: ring_gemm.py.

Epilogues and the residual stream: skinny_linear.py, which describes the launches.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_columns(places, column, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A block of columns; past the last one, where blocks do not end with them, 0."""
    if K % BLOCK_K == 0:  # noqa: SIM108 (known at compile time)
        found = tl.load(places)
    else:
        found = tl.load(places, mask=column < K, other=0.0)
    return found


@triton.jit
def multiplied(
    block,
    x,
    squares,
    start,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
    SHARE: tl.constexpr,
    SIDE: tl.constexpr,
):
    """A block of W from column `start` on times x: sums of RUN columns, which is what a thread loads of W at once; so
    there are few to keep, and few scales of squares to load."""
    RUNS: tl.constexpr = BLOCK_K // RUN
    sums = tl.sum(tl.reshape(block.to(tl.float32) * x, [BLOCK_N, RUNS, RUN]), 2)
    if SHARE > 0:
        column = start + RUN * tl.arange(0, RUNS)
        sums = sums * load_columns(squares + column // SIDE, column, K, BLOCK_K)[None, :]
    return sums


@triton.jit
def gemv(
    x_k,
    weight_nk,
    scale_n,
    bias_n,
    y_n,
    residual_n,
    gained_n,
    gain_n,
    squares_in,
    squares_out,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTIALS: tl.constexpr,  # partial sums of squares that make up the input's; 0: the input is not scaled
    PARTIALS_P2: tl.constexpr,
    EPILOGUE: tl.constexpr,  # "store", "silu", "residual"
    HAS_BIAS: tl.constexpr,
    FP8: tl.constexpr,  # weights in e4m3
    SHARE: tl.constexpr,  # rows of W that have one scale for every SIDE features; 0: a row has one
    SIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    RUN: tl.constexpr = 16 if FP8 else 8
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weights = weight_nk + n[:, None] * K + k[None, :]
    first = load_columns(weights, k[None, :], K, BLOCK_K)
    if EPILOGUE == "silu":
        first_up = load_columns(weights + N * K, k[None, :], K, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    scale = 1.0
    if PARTIALS > 0:
        p = tl.arange(0, PARTIALS_P2)
        squares = tl.sum(tl.load(squares_in + p, mask=p < PARTIALS, other=0.0), 0)
        scale = tl.rsqrt(squares / K + eps)
    squares = scale_n
    squares_up = scale_n
    if SHARE > 0:
        GROUPS: tl.constexpr = (K + SIDE - 1) // SIDE
        squares += tile * BLOCK_N // SHARE * GROUPS
        squares_up += (N + tile * BLOCK_N) // SHARE * GROUPS
    x = load_columns(x_k + k, k, K, BLOCK_K).to(tl.float32)[None, :]
    products = multiplied(first, x, squares, 0, K, BLOCK_N, BLOCK_K, RUN, SHARE, SIDE)
    if EPILOGUE == "silu":
        products_up = multiplied(first_up, x, squares_up, 0, K, BLOCK_N, BLOCK_K, RUN, SHARE, SIDE)
    for start in tl.static_range(BLOCK_K, K, BLOCK_K):
        x = load_columns(x_k + start + k, start + k, K, BLOCK_K).to(tl.float32)[None, :]
        column = (start + k)[None, :]
        block = load_columns(weights + start, column, K, BLOCK_K)
        products += multiplied(block, x, squares, start, K, BLOCK_N, BLOCK_K, RUN, SHARE, SIDE)
        if EPILOGUE == "silu":
            block = load_columns(weights + N * K + start, column, K, BLOCK_K)
            products_up += multiplied(block, x, squares_up, start, K, BLOCK_N, BLOCK_K, RUN, SHARE, SIDE)
    acc = tl.sum(products, 1) * scale
    if FP8 and SHARE == 0:
        acc *= tl.load(scale_n + n)
    if HAS_BIAS:
        acc += tl.load(bias_n + n).to(tl.float32)
    if EPILOGUE == "store":
        tl.store(y_n + n, acc.to(y_n.dtype.element_ty))
    elif EPILOGUE == "silu":
        up = tl.sum(products_up, 1) * scale
        if FP8 and SHARE == 0:
            up *= tl.load(scale_n + N + n)
        if HAS_BIAS:
            up += tl.load(bias_n + N + n).to(tl.float32)
        tl.store(y_n + n, (acc / (1.0 + tl.exp(-acc)) * up).to(y_n.dtype.element_ty))
    else:
        rounded = (tl.load(residual_n + n).to(tl.float32) + acc).to(residual_n.dtype.element_ty)
        total = rounded.to(tl.float32)
        gain = tl.load(gain_n + n).to(tl.float32)
        tl.store(residual_n + n, rounded)
        tl.store(gained_n + n, (total * gain).to(gained_n.dtype.element_ty))
        tl.store(squares_out + tile, tl.sum(total * total, 0))
