"""A mixture of experts of one row (decode of a single sequence): its chosen experts' matrices times a vector.

Two kernels instead of sort, two products and a sum: with one row a program knows from its number which choice it works
for. The second requests its first weights before the wait for the first, since the choices are two kernels old by then,
and adds all experts itself: no sum is left over. What is read before a wait and changes from layer to layer is read
past the L1 cache, which may hold it from a kernel before. Weights in e4m3 are widened in registers; the vector stays as
it is. Their scales are an output channel's, or (W_BLOCK) those of square blocks, which then scale the vector instead.
More rows: moe_gemm.py. Launches: moe_launches.py.

Shape suffixes: j choices, n output features, k input features.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.gemv import load_columns


@triton.jit
def load_chosen(places, is_choice, column, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """As `load_columns`, of choices that there are."""
    if K % BLOCK_K == 0:
        found = tl.load(places, mask=is_choice, other=0.0)
    else:
        found = tl.load(places, mask=is_choice & (column < K), other=0.0)
    return found


@triton.jit
def gate_up_kernel(
    x_k,
    weight,
    expert_j,
    scale_m,
    weight_scale,
    bias_n,
    y_jn,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8: tl.constexpr,
    W_BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    LIMIT: tl.constexpr,  # the gated activation's clamp (reference/moe.py: clamped); 0: silu(gate) * up
    SLOPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = silu(gate) * up of one choice's expert, the input scaled by scale_m[0]."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    choice = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    if K % BLOCK_K == 0:
        x = tl.load(x_k + k, cache_modifier=".cg")  # three kernels old
    else:
        x = tl.load(x_k + k, mask=k < K, other=0.0, cache_modifier=".cg")
    x = x.to(tl.float32)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(expert_j + choice).to(tl.int64)
    weights = weight + expert * (2 * N * K) + n[:, None] * K + k[None, :]
    first_row = expert * (2 * N) + tl.program_id(0) * BLOCK_N
    x_up = x
    if W_BLOCK > 0:
        square = weight_scale + (first_row // W_BLOCK) * (K // W_BLOCK)
        x_up = x * tl.load(square + (N // W_BLOCK) * (K // W_BLOCK) + k // W_BLOCK)[None, :]
        x = x * tl.load(square + k // W_BLOCK)[None, :]
    gate = load_columns(weights, k[None, :], K, BLOCK_K).to(tl.float32) * x
    up = load_columns(weights + N * K, k[None, :], K, BLOCK_K).to(tl.float32) * x_up
    for start in tl.static_range(BLOCK_K, K, BLOCK_K):
        column = (start + k)[None, :]
        x = load_columns(x_k + start + k, start + k, K, BLOCK_K).to(tl.float32)[None, :]
        x_up = x
        if W_BLOCK > 0:
            x_up = x * tl.load(square + (N // W_BLOCK) * (K // W_BLOCK) + (start + k) // W_BLOCK)[None, :]
            x = x * tl.load(square + (start + k) // W_BLOCK)[None, :]
        gate += load_columns(weights + start, column, K, BLOCK_K).to(tl.float32) * x
        up += load_columns(weights + N * K + start, column, K, BLOCK_K).to(tl.float32) * x_up
    scale = tl.load(scale_m)
    gate_n = tl.sum(gate, 1) * scale
    up_n = tl.sum(up, 1) * scale
    if FP8 and W_BLOCK == 0:
        channel = weight_scale + first_row + tl.arange(0, BLOCK_N)
        gate_n = gate_n * tl.load(channel)
        up_n = up_n * tl.load(channel + N)
    if BIASED:
        bias = bias_n + first_row + tl.arange(0, BLOCK_N)
        gate_n += tl.load(bias).to(tl.float32)
        up_n += tl.load(bias + N).to(tl.float32)
    if LIMIT > 0:
        gate_n = tl.minimum(gate_n, LIMIT)
        up_n = tl.maximum(tl.minimum(up_n, LIMIT), -LIMIT) + 1.0
        inner_n = gate_n / (1.0 + tl.exp(-SLOPE * gate_n)) * up_n
    else:
        inner_n = gate_n / (1.0 + tl.exp(-gate_n)) * up_n
    tl.store(y_jn + choice * N + n, inner_n.to(y_jn.dtype.element_ty))


@triton.jit
def down_kernel(
    x_jk,
    weight,
    expert_j,
    weight_j,
    weight_scale,
    bias_n,
    residual_n,
    gained_n,
    gain_n,
    squares_out,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_P2: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8: tl.constexpr,
    W_BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual += the weighted sum of all chosen experts, and the next norm's inputs (skinny_linear.py)."""
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, TOP_K_P2)
    k = tl.arange(0, BLOCK_K)
    is_choice = j < TOP_K
    expert = tl.load(expert_j + j, mask=is_choice, other=0, cache_modifier=".cg").to(tl.int64)
    share = tl.load(weight_j + j, mask=is_choice, other=0.0, cache_modifier=".cg")[:, None]
    rows = expert[:, None] * N + n[None, :]
    weights = weight + rows[:, :, None] * K + k[None, None, :]
    first = load_chosen(weights, is_choice[:, None, None], k[None, None, :], K, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inputs = x_jk + j[:, None] * K + k[None, :]
    x = load_chosen(inputs, is_choice[:, None], k[None, :], K, BLOCK_K).to(tl.float32) * share
    if W_BLOCK > 0:
        squares = weight_scale + ((expert * N + tile * BLOCK_N) // W_BLOCK * (K // W_BLOCK))[:, None]
        x = x * tl.load(squares + k[None, :] // W_BLOCK)
    products = first.to(tl.float32) * x[:, None, :]
    for start in tl.static_range(BLOCK_K, K, BLOCK_K):
        x = load_chosen(inputs + start, is_choice[:, None], (start + k)[None, :], K, BLOCK_K).to(tl.float32) * share
        if W_BLOCK > 0:
            x = x * tl.load(squares + (start + k[None, :]) // W_BLOCK)
        block = load_chosen(weights + start, is_choice[:, None, None], (start + k)[None, None, :], K, BLOCK_K)
        products += block.to(tl.float32) * x[:, None, :]
    acc_jn = tl.sum(products, 2)
    if FP8 and W_BLOCK == 0:
        acc_jn = acc_jn * tl.load(weight_scale + rows)
    if BIASED:
        acc_jn += tl.load(bias_n + rows, mask=is_choice[:, None], other=0.0).to(tl.float32) * share
    acc = tl.sum(acc_jn, 0)
    rounded = (tl.load(residual_n + n).to(tl.float32) + acc).to(residual_n.dtype.element_ty)
    total = rounded.to(tl.float32)
    gain = tl.load(gain_n + n).to(tl.float32)
    tl.store(residual_n + n, rounded)
    tl.store(gained_n + n, (total * gain).to(gained_n.dtype.element_ty))
    tl.store(squares_out + tile, tl.sum(total * total, 0))
