"""A few rows times a matrix (decode of 2 to 128 sequences), for Hopper: y[m, n] = sum_k x[m, k] W[n, k].

Bound by reading W, so everything serves one end: loads of W in flight at all times. A program owns BLOCK_N rows of W
and keeps a ring of STAGES blocks in shared memory, filled by the tensor memory accelerator and multiplied by wgmma;
the weights of the whole ring are requested BEFORE the wait for the kernel that makes x. That order is why this is
Gluon: Triton's pipeliner would tie both operands' loads together. Not for prompts (x is not tiled along m). Operands
are both bf16, or both e4m3: with a scale a row of each, which the epilogue applies, or (SHARE) with one for every SIDE
columns of a row of x and every square of W, which are applied to what so many columns give before it is added; a slot
of the ring then holds GROUPS blocks of W and of x.

Epilogues and the residual stream: skinny_linear.py, which describes the launches.

Names: r, c rows and columns of the accumulator: (n, m) when SWAP_AB (W is the left operand: BLOCK_M may be below 64),
else (m, n).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, tile, pred): a tile's way into shared memory; renamed after Triton 3.6."""

meet = getattr(gl, "barrier", None) or gl.thread_barrier
"""All threads of a program wait for each other; renamed likewise."""


@gluon.jit
def epilogue(
    acc_rc,
    up_rc,
    scale_m,
    scale_rc,
    up_scale_rc,
    residual_rc,
    row_n,
    row_m,
    m,
    tile,
    bias_n,
    y_mn,
    residual_mn,
    gained_mn,
    gain_n,
    squares_out,
    num_rows,
    N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PARTIALS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    CHANNELS: gl.constexpr,
    N_AXIS: gl.constexpr,
):
    """Finish a whole accumulator: scale it, add bias, apply what EPILOGUE says, store."""
    is_real = row_m < num_rows
    place = row_m * N + row_n
    if CHANNELS:
        acc_rc = acc_rc * scale_rc
    if PARTIALS > 0 or CHANNELS:
        acc_rc = acc_rc * gl.expand_dims(scale_m, N_AXIS)
    if HAS_BIAS:
        acc_rc = acc_rc + gl.load(bias_n + row_n).to(gl.float32)
    if EPILOGUE == "store":
        gl.store(y_mn + place, acc_rc.to(y_mn.dtype.element_ty), mask=is_real)
    elif EPILOGUE == "silu":
        if CHANNELS:
            up_rc = up_rc * up_scale_rc
        if PARTIALS > 0 or CHANNELS:
            up_rc = up_rc * gl.expand_dims(scale_m, N_AXIS)
        if HAS_BIAS:
            up_rc = up_rc + gl.load(bias_n + N + row_n).to(gl.float32)
        gl.store(y_mn + place, (acc_rc / (1.0 + gl.exp(-acc_rc)) * up_rc).to(y_mn.dtype.element_ty), mask=is_real)
    else:
        rounded_rc = (residual_rc.to(gl.float32) + acc_rc).to(residual_mn.dtype.element_ty)
        total_rc = rounded_rc.to(gl.float32)
        gain_rc = gl.load(gain_n + row_n).to(gl.float32)
        gl.store(residual_mn + place, rounded_rc, mask=is_real)
        gl.store(gained_mn + place, (total_rc * gain_rc).to(gained_mn.dtype.element_ty), mask=is_real)
        gl.store(squares_out + tile * BLOCK_M + m, gl.sum(total_rc * total_rc, N_AXIS), mask=m < num_rows)


@gluon.jit
def load_weights(
    weight_desc,
    bar,
    ring,
    slot,
    n,
    k,
    N: gl.constexpr,
    MATRICES: gl.constexpr,
    GROUPS: gl.constexpr,
    WIDTH: gl.constexpr,
    pred,
):
    """Request one ring slot's blocks of W, or of both stacked matrices."""
    for g in gl.static_range(GROUPS):
        for i in gl.static_range(MATRICES):
            block = ring.index((slot * GROUPS + g) * MATRICES + i)
            load_tile(weight_desc, [i * N + n, k + g * WIDTH], bar, block, pred=pred)


@gluon.jit
def load_rows(x_desc, bar, ring, slot, k, GROUPS: gl.constexpr, WIDTH: gl.constexpr, pred):
    """Request one ring slot's blocks of x."""
    for g in gl.static_range(GROUPS):
        load_tile(x_desc, [0, k + g * WIDTH], bar, ring.index(slot * GROUPS + g), pred=pred)


@gluon.jit
def multiply(w_ring, x_ring, slot, acc_rc, up_rc, MATRICES: gl.constexpr, SWAP_AB: gl.constexpr):
    """Add one ring slot's products; waits for the tensor cores, so that the slot may be refilled."""
    if SWAP_AB:
        x_km = x_ring.index(slot).permute((1, 0))
        acc_rc = warpgroup_mma(w_ring.index(slot * MATRICES), x_km, acc_rc, is_async=True)
        if MATRICES == 2:
            up_rc = warpgroup_mma(w_ring.index(slot * MATRICES + 1), x_km, up_rc, is_async=True)
    else:
        x_mk = x_ring.index(slot)
        acc_rc = warpgroup_mma(x_mk, w_ring.index(slot * MATRICES).permute((1, 0)), acc_rc, is_async=True)
        if MATRICES == 2:
            up_rc = warpgroup_mma(x_mk, w_ring.index(slot * MATRICES + 1).permute((1, 0)), up_rc, is_async=True)
    if MATRICES == 2:
        acc_rc, up_rc = warpgroup_mma_wait(0, deps=[acc_rc, up_rc])
    else:
        acc_rc = warpgroup_mma_wait(0, deps=[acc_rc])
    return acc_rc, up_rc


@gluon.jit
def begin_part(
    w_ring,
    x_ring,
    slot,
    any_rc,
    PART: gl.constexpr,
    MATRICES: gl.constexpr,
    GROUPS: gl.constexpr,
    SWAP_AB: gl.constexpr,
):
    """Begin one of the products of a ring slot: for each group of columns there is one with each matrix."""
    w = w_ring.index(slot * GROUPS * MATRICES + PART)
    x = x_ring.index(slot * GROUPS + PART // MATRICES)
    if SWAP_AB:
        part_rc = warpgroup_mma(w, x.permute((1, 0)), any_rc, use_acc=False, is_async=True)
    else:
        part_rc = warpgroup_mma(x, w.permute((1, 0)), any_rc, use_acc=False, is_async=True)
    return part_rc


@gluon.jit
def multiply_groups(
    w_ring,
    x_ring,
    slot,
    bar,
    phase,
    acc_rc,
    up_rc,
    groups,  # at this slot's first group: its scales of x, by column or row of the accumulator ...
    is_real,
    squares,  # ... and of W, and of the matrix stacked below
    squares_up,
    STRIDE: gl.constexpr,  # from one group's scales of x to the next
    MATRICES: gl.constexpr,
    GROUPS: gl.constexpr,
    SWAP_AB: gl.constexpr,
    AHEAD: gl.constexpr,  # a product runs while the one before it is added
    N_AXIS: gl.constexpr,
):
    """Wait for a ring slot and add its products times their scales; waits as `multiply`."""
    PARTS: gl.constexpr = GROUPS * MATRICES
    scales = ()  # asked for before the wait, so that they come meanwhile
    for g in gl.static_range(GROUPS):
        x_scale = gl.load(groups + g * STRIDE, mask=is_real, other=0.0)
        scales = scales + (gl.expand_dims(x_scale * gl.load(squares + g), N_AXIS),)  # noqa: RUF005 (no star in Gluon)
        if MATRICES == 2:
            scales = scales + (gl.expand_dims(x_scale * gl.load(squares_up + g), N_AXIS),)  # noqa: RUF005
    mbarrier.wait(bar, phase)
    part_rc = begin_part(w_ring, x_ring, slot, acc_rc, 0, MATRICES, GROUPS, SWAP_AB)
    for i in gl.static_range(PARTS):
        next_rc = part_rc
        if AHEAD and i + 1 < PARTS:
            next_rc = begin_part(w_ring, x_ring, slot, acc_rc, i + 1, MATRICES, GROUPS, SWAP_AB)
            done_rc = warpgroup_mma_wait(1, deps=[part_rc])
        else:
            done_rc = warpgroup_mma_wait(0, deps=[part_rc])
        if i % MATRICES == 0:
            acc_rc = acc_rc + done_rc * scales[i]
        else:
            up_rc = up_rc + done_rc * scales[i]
        if i + 1 < PARTS and not AHEAD:
            next_rc = begin_part(w_ring, x_ring, slot, acc_rc, i + 1, MATRICES, GROUPS, SWAP_AB)
        part_rc = next_rc
    return acc_rc, up_rc


@gluon.jit(do_not_specialize=["num_rows"])
def ring_gemm(
    x_desc,
    weight_desc,
    x_scale_m,
    scale_n,
    bias_n,
    y_mn,
    residual_mn,
    gained_mn,
    gain_n,
    squares_in,
    squares_out,
    split_acc,
    split_count,
    num_rows,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    PARTIALS: gl.constexpr,  # partial sums of squares a row of the input; 0: the input is not scaled
    PARTIALS_P2: gl.constexpr,
    EPILOGUE: gl.constexpr,  # "store", "silu", "residual"
    HAS_BIAS: gl.constexpr,
    FP8: gl.constexpr,  # both operands in e4m3
    SHARE: gl.constexpr,  # rows of W that have one scale for every SIDE features; 0: rows of x and of W have one
    SIDE: gl.constexpr,
    SWAP_AB: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    tile = gl.program_id(0)
    split = gl.program_id(1)
    STEPS: gl.constexpr = K // SPLIT_K // BLOCK_K
    MATRICES: gl.constexpr = 2 if EPILOGUE == "silu" else 1
    FILL: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    WIDTH: gl.constexpr = SIDE if SHARE > 0 else BLOCK_K
    GROUPS: gl.constexpr = BLOCK_K // WIDTH
    ITEM_BYTES: gl.constexpr = 1 if FP8 else 2
    SLOT_BYTES: gl.constexpr = ITEM_BYTES * (MATRICES * BLOCK_N + BLOCK_M) * BLOCK_K
    n0 = tile * BLOCK_N
    k0 = split * (K // SPLIT_K)
    SLOTS: gl.constexpr = STAGES * GROUPS
    w_ring = gl.allocate_shared_memory(weight_desc.dtype, [SLOTS * MATRICES, BLOCK_N, WIDTH], weight_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [SLOTS, BLOCK_M, WIDTH], x_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(FILL):
        mbarrier.expect(bars.index(i), SLOT_BYTES)
        load_weights(weight_desc, bars.index(i), w_ring, i, n0, k0 + i * BLOCK_K, N, MATRICES, GROUPS, WIDTH, True)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for i in gl.static_range(FILL):
        load_rows(x_desc, bars.index(i), x_ring, i, k0 + i * BLOCK_K, GROUPS, WIDTH, True)

    N_AXIS: gl.constexpr = 0 if SWAP_AB else 1
    R: gl.constexpr = BLOCK_N if SWAP_AB else BLOCK_M
    C: gl.constexpr = BLOCK_M if SWAP_AB else BLOCK_N
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1], [16, C if C < 256 else 256, 32 // ITEM_BYTES]
    )
    if SWAP_AB:
        out_layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    else:
        out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4] if BLOCK_N >= 32 else [16, 2], [WARPS, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, out_layout)
    col_layout: gl.constexpr = gl.SliceLayout(0, out_layout)
    r = gl.arange(0, R, layout=row_layout)
    c = gl.arange(0, C, layout=col_layout)
    if SWAP_AB:
        m = c
        row_n = gl.expand_dims(n0 + r, 1)
        row_m = gl.expand_dims(m, 0)
    else:
        m = r
        row_n = gl.expand_dims(n0 + c, 0)
        row_m = gl.expand_dims(m, 1)
    scale_m = m.to(gl.float32)
    if PARTIALS > 0:
        if SWAP_AB:
            p = gl.expand_dims(gl.arange(0, PARTIALS_P2, layout=row_layout), 1)
        else:
            p = gl.expand_dims(gl.arange(0, PARTIALS_P2, layout=col_layout), 0)
        is_part = (p < PARTIALS) & (row_m < num_rows)
        squares_m = gl.sum(gl.load(squares_in + p * BLOCK_M + row_m, mask=is_part, other=0.0), N_AXIS)
        scale_m = gl.rsqrt(squares_m / K + eps)
    scale_rc = scale_m
    up_scale_rc = scale_m
    CHANNELS: gl.constexpr = FP8 and SHARE == 0
    if CHANNELS:
        x_scale = gl.load(x_scale_m + m, mask=m < num_rows, other=0.0)
        scale_m = scale_m * x_scale if PARTIALS > 0 else x_scale
        scale_rc = gl.load(scale_n + row_n)
        up_scale_rc = gl.load(scale_n + N + row_n) if MATRICES == 2 else scale_rc
    residual_rc = scale_m
    if EPILOGUE == "residual":
        residual_rc = gl.load(residual_mn + row_m * N + row_n, mask=row_m < num_rows, other=0.0)

    acc_rc = gl.zeros([R, C], gl.float32, mma_layout)
    up_rc = acc_rc
    AHEAD: gl.constexpr = BLOCK_M * BLOCK_N <= 1024 * WARPS  # four accumulators would take too many registers
    if SHARE > 0:
        group_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(N_AXIS, mma_layout))
        groups = x_scale_m + (k0 // WIDTH) * BLOCK_M + group_m
        squares = scale_n + (n0 // SHARE) * (K // WIDTH) + k0 // WIDTH
        squares_up = scale_n + ((N + n0) // SHARE) * (K // WIDTH) + k0 // WIDTH
    for step in range(STEPS):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        if SHARE > 0:
            first = step * GROUPS
            acc_rc, up_rc = multiply_groups(
                w_ring,
                x_ring,
                slot,
                bars.index(slot),
                phase,
                acc_rc,
                up_rc,
                groups + first * BLOCK_M,
                group_m < num_rows,
                squares + first,
                squares_up + first,
                BLOCK_M,
                MATRICES,
                GROUPS,
                SWAP_AB,
                AHEAD,
                N_AXIS,
            )
        else:
            mbarrier.wait(bars.index(slot), phase)
            acc_rc, up_rc = multiply(w_ring, x_ring, slot, acc_rc, up_rc, MATRICES, SWAP_AB)
        meet()
        refill = step + STAGES
        k = k0 + refill * BLOCK_K
        mbarrier.expect(bars.index(slot), SLOT_BYTES, pred=refill < STEPS)
        load_weights(weight_desc, bars.index(slot), w_ring, slot, n0, k, N, MATRICES, GROUPS, WIDTH, refill < STEPS)
        load_rows(x_desc, bars.index(slot), x_ring, slot, k, GROUPS, WIDTH, refill < STEPS)
    acc_rc = gl.convert_layout(acc_rc, out_layout)
    up_rc = gl.convert_layout(up_rc, out_layout) if MATRICES == 2 else acc_rc
    is_last = True
    if SPLIT_K > 1:
        TILE_SIZE: gl.constexpr = BLOCK_M * BLOCK_N
        parts = split_acc + tile * SPLIT_K * TILE_SIZE
        inside = row_m * BLOCK_N + (row_n - n0)
        gl.store(parts + split * TILE_SIZE + inside, acc_rc)
        meet()
        arrived = gl.atomic_add(split_count + tile, 1, sem="acq_rel")
        is_last = arrived == SPLIT_K - 1
    if is_last:
        if SPLIT_K > 1:  # in this order whoever came last, so that results do not vary
            acc_rc = gl.zeros([R, C], gl.float32, out_layout)
            for i in gl.static_range(SPLIT_K):
                acc_rc += gl.load(parts + i * TILE_SIZE + inside, cache_modifier=".cg")
            gl.store(split_count + tile, 0)
        epilogue(
            acc_rc,
            up_rc,
            scale_m,
            scale_rc,
            up_scale_rc,
            residual_rc,
            row_n,
            row_m,
            m,
            tile,
            bias_n,
            y_mn,
            residual_mn,
            gained_mn,
            gain_n,
            squares_out,
            num_rows,
            N,
            BLOCK_M,
            PARTIALS,
            EPILOGUE,
            HAS_BIAS,
            CHANNELS,
            N_AXIS,
        )
