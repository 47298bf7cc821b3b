"""Products of a mixture of experts over rows sorted by expert (moe_route.py), and the sum of each row's experts.

The first product gathers its rows by index and applies the activation (GATED: to the first of two matrices, whose
product with the other it leaves), the second weighs its rows and scatters
them by pair; the sum adds a row's pairs in the order of its choices, so no result depends on which program came first.
Weights, and the second product's rows, are read by the tensor memory accelerator where there is one (TMA), by pointers
elsewhere; tiles that hold no pair end at once, so only chosen experts are read. What is read before the wait and
changes from layer to layer is read past the L1 cache, which may hold it from a kernel before. Launches:
moe_launches.py.

**fp8.** Weights in e4m3 have a scale an output channel, which the epilogue applies, or one a square block of W_BLOCK
rows and columns, which is applied as k goes by. Rows are e4m3 too: those of the first product with a scale each
(scale_m), those of the second with one for every group of BLOCK_K features, as the first product's programs made them
(a program sees only BLOCK_N features of a row).

Shape suffixes: r rows of the input, s places, f flat pairs, t tiles, m rows, n output features, k input features, g
groups of features; as the tile's own axes: m places, n output features.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.activations import activated


@triton.jit
def load_weights(weight, row, k, ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """ROWS x BLOCK_K of all experts' stacked matrices, from `row` and `k` on."""
    if TMA:
        block = weight.load([row, k])
    else:
        n = row.to(tl.int64) + tl.arange(0, ROWS)
        block = tl.load(weight + n[:, None] * K + (k + tl.arange(0, BLOCK_K))[None, :])
    return block


@triton.jit
def add_product(x, w, acc, SWAP_AB: tl.constexpr):
    """acc + x w^T, or its transpose."""
    w = w.to(x.dtype)  # equal already, but in tests, whose rows stay wide
    if SWAP_AB:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def expert_gemm(
    x_rk,
    weight,
    pair_s,
    expert_t,
    scale_m,
    weight_f,
    bias_n,
    weight_scale,
    x_scale_sg,
    y_rn,
    y_scale_sg,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FIRST: tl.constexpr,  # first product: x by row, y by place; else second: x by place, y by pair
    GATED: tl.constexpr,  # the first product has two matrices, gate above up
    ACTIVATION: tl.constexpr,  # of the first product, by its name in reference/activations.py
    SCALED: tl.constexpr,  # the first product's rows are still to be scaled by scale_m
    SWAP_AB: tl.constexpr,  # weights as the left operand, so that BLOCK_M may be below 64
    FP8: tl.constexpr,  # weights and rows in e4m3
    W_BLOCK: tl.constexpr,  # side of the blocks of weights that share a scale; 0: output channels have one
    BIASED: tl.constexpr,  # all experts' biases, stacked as their matrices
    LIMIT: tl.constexpr,  # the clamp of gpt-oss's activation (reference/moe.py: clamped); 0: it is another
    SLOPE: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    n0 = tl.program_id(0) * BLOCK_N
    tile = tl.program_id(1)
    s = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if FIRST and PDL:  # the second product's indices are two kernels old
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(expert_t + tile, cache_modifier=".cg")
    if expert < 0:
        return
    pair = tl.load(pair_s + s, cache_modifier=".cg")
    is_real = pair >= 0
    if PDL and not FIRST:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    MATRICES: tl.constexpr = 2 if GATED else 1
    first_row = expert * (MATRICES * N) + n0
    source = (tl.where(is_real, pair, 0) // TOP_K) if FIRST else s
    X_TMA: tl.constexpr = TMA and not FIRST  # places follow each other; those without a pair keep what they hold
    if not X_TMA:
        k = tl.arange(0, BLOCK_K)
        x_rows = x_rk + source.to(tl.int64)[:, None] * K + k[None, :]
    R: tl.constexpr = BLOCK_N if SWAP_AB else BLOCK_M
    C: tl.constexpr = BLOCK_M if SWAP_AB else BLOCK_N
    acc = tl.zeros([R, C], tl.float32)
    up = tl.zeros([R, C], tl.float32)
    M_AXIS: tl.constexpr = 0 if SWAP_AB else 1
    GROUPED: tl.constexpr = FP8 and not FIRST
    PIECEWISE: tl.constexpr = GROUPED or (FP8 and W_BLOCK > 0)  # products of BLOCK_K features are scaled one by one
    GROUPS: tl.constexpr = K // BLOCK_K
    for k0 in range(0, K, BLOCK_K):
        if PIECEWISE:
            piece_scale = tl.full([BLOCK_M], 1.0, tl.float32)
            if GROUPED:
                piece_scale = tl.load(x_scale_sg + s * GROUPS + k0 // BLOCK_K, mask=is_real, other=0.0)
            up_scale = piece_scale
            if W_BLOCK > 0:
                square = weight_scale + (first_row // W_BLOCK) * (K // W_BLOCK) + k0 // W_BLOCK
                piece_scale = piece_scale * tl.load(square)
                if GATED:
                    up_scale = up_scale * tl.load(square + (N // W_BLOCK) * (K // W_BLOCK))
        x = x_rk.load([tile * BLOCK_M, k0]) if X_TMA else tl.load(x_rows + k0, mask=is_real[:, None], other=0.0)
        w = load_weights(weight, first_row, k0, BLOCK_N, K, BLOCK_K, TMA)
        if PIECEWISE:
            acc += add_product(x, w, tl.zeros([R, C], tl.float32), SWAP_AB) * tl.expand_dims(piece_scale, M_AXIS)
        else:
            acc = add_product(x, w, acc, SWAP_AB)
        if GATED:
            u = load_weights(weight, first_row + N, k0, BLOCK_N, K, BLOCK_K, TMA)
            if PIECEWISE:
                up += add_product(x, u, tl.zeros([R, C], tl.float32), SWAP_AB) * tl.expand_dims(up_scale, M_AXIS)
            else:
                up = add_product(x, u, up, SWAP_AB)
    if FP8 and W_BLOCK == 0:
        channel = weight_scale + first_row + tl.arange(0, BLOCK_N)
        acc = acc * tl.expand_dims(tl.load(channel), 1 - M_AXIS)
        if GATED:
            up = up * tl.expand_dims(tl.load(channel + N), 1 - M_AXIS)
    if FIRST and SCALED:
        scale = tl.expand_dims(tl.load(scale_m + source, mask=is_real, other=0.0), M_AXIS)
        acc = acc * scale
        up = up * scale
    if BIASED:
        bias = bias_n + expert.to(tl.int64) * (MATRICES * N) + n0 + tl.arange(0, BLOCK_N)
        acc += tl.expand_dims(tl.load(bias).to(tl.float32), 1 - M_AXIS)
        if GATED:
            up += tl.expand_dims(tl.load(bias + N).to(tl.float32), 1 - M_AXIS)
    if FIRST:
        if LIMIT > 0:
            acc = tl.minimum(acc, LIMIT)
            up = tl.maximum(tl.minimum(up, LIMIT), -LIMIT) + 1.0
            acc = acc / (1.0 + tl.exp(-SLOPE * acc)) * up
        else:
            acc = activated(acc, ACTIVATION)
            if GATED:
                acc = acc * up
        if FP8:
            group_scale = tl.maximum(tl.max(tl.abs(acc), M_AXIS), 1e-12) / 448.0
            tl.store(y_scale_sg + s * (N // BLOCK_N) + tl.program_id(0), group_scale, mask=is_real)
            acc = acc / tl.expand_dims(group_scale, M_AXIS)
        target = s
    else:
        acc = acc * tl.expand_dims(tl.load(weight_f + pair, mask=is_real, other=0.0), M_AXIS)
        target = pair
    n = tl.expand_dims(n0 + tl.arange(0, BLOCK_N), 1 - M_AXIS)
    place = tl.expand_dims(target.to(tl.int64), M_AXIS) * N + n
    tl.store(y_rn + place, acc.to(y_rn.dtype.element_ty), mask=tl.expand_dims(is_real, M_AXIS))


@triton.jit
def combine_kernel(
    y_fn,
    out_mn,
    residual_mn,
    gained_mn,
    gain_n,
    squares_out,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RESIDUAL: tl.constexpr,  # add to the residual and make the next norm's inputs (skinny_linear.py); else store
    BUCKET: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N features of one row: the sum of its (weighted) experts."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    place = row.to(tl.int64) * N + n
    if RESIDUAL:
        gain = tl.load(gain_n + n, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_mn + place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([BLOCK_N], tl.float32)
    for choice in tl.static_range(TOP_K):
        total += tl.load(y_fn + (row.to(tl.int64) * TOP_K + choice) * N + n, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        rounded = (residual + total).to(residual_mn.dtype.element_ty)
        total = rounded.to(tl.float32)
        tl.store(residual_mn + place, rounded, mask=inside)
        tl.store(gained_mn + place, (total * gain).to(gained_mn.dtype.element_ty), mask=inside)
        tl.store(squares_out + tile * BUCKET + row, tl.sum(total * total, 0))
    else:
        tl.store(out_mn + place, total.to(out_mn.dtype.element_ty), mask=inside)
