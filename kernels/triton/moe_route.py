"""Which experts take which rows of a mixture of experts, wholly on the device: router product, top-k, sort by expert.

The sort's result is a list of tiles of BLOCK_M places. A place holds a pair (row * TOP_K + choice) or -1; all pairs of
a tile belong to one expert, or the tile has none (-1). The list's length depends on the number of pairs only, so that
the launches do not depend on what was routed. Products over the tiles: moe_gemm.py. Launches: moe.py.

Shape suffixes: m rows, k model dim, e experts, p parts of a sum, f flat pairs, s places, t tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def router_kernel(
    x_mk,
    router_ek,
    logit_pme,
    num_rows,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part (BLOCK_K of k) of the router's product for BLOCK_M rows; the parts are summed by whoever reads them."""
    part = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, EXPERTS_P2)
    k = part * BLOCK_K + tl.arange(0, BLOCK_K)
    weights = tl.load(
        router_ek + e[:, None] * K + k[None, :], mask=(e < EXPERTS)[:, None] & (k < K)[None, :], other=0.0
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_real = m < num_rows
    x = tl.load(x_mk + m[:, None] * K + k[None, :], mask=is_real[:, None] & (k < K)[None, :], other=0.0)
    logit_me = tl.dot(x, tl.trans(weights), input_precision="ieee")
    place = (part * num_rows + m)[:, None] * EXPERTS + e[None, :]
    tl.store(logit_pme + place, logit_me, mask=is_real[:, None] & (e < EXPERTS)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def top_k_kernel(
    logit_pme,
    bias_e,
    squares_f,
    expert_mk,
    weight_mk,
    scale_m,
    x_mk,
    number_mk,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_P2: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BIASED: tl.constexpr,  # logits have a bias
    PARTS: tl.constexpr,
    PARTS_P2: tl.constexpr,
    PARTIALS: tl.constexpr,  # sums of squares a row, BUCKET apart (skinny_linear.py); 0: rows are normed already
    PARTIALS_P2: tl.constexpr,
    BUCKET: tl.constexpr,
    QUANTIZE: tl.constexpr,  # the row itself, to e4m3 (reference/quantize_rows.py); its scale is multiplied to 1 / rms
    PDL: tl.constexpr,
):
    """One row: its TOP_K experts, best first (of equals the lower number), their weights, and 1 / rms of the row."""
    row = tl.program_id(0)
    e = tl.arange(0, EXPERTS_P2)
    p = tl.arange(0, PARTS_P2)
    if QUANTIZE:
        k = tl.arange(0, WIDTH_P2)
        x = tl.load(x_mk + row * WIDTH + k, mask=k < WIDTH, other=0.0, cache_modifier=".cg").to(tl.float32)
        x_scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / 448.0
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = (p[:, None] * num_rows + row) * EXPERTS + e[None, :]
    is_part = (p < PARTS)[:, None] & (e < EXPERTS)[None, :]
    logit_e = tl.sum(tl.load(logit_pme + place, mask=is_part, other=0.0).to(tl.float32), 0)
    if PARTIALS > 0:
        q = tl.arange(0, PARTIALS_P2)
        squares = tl.sum(tl.load(squares_f + q * BUCKET + row, mask=q < PARTIALS, other=0.0), 0)
        scale = tl.rsqrt(squares / WIDTH + eps)
        logit_e = logit_e * scale
        if QUANTIZE:
            tl.store(number_mk + row * WIDTH + k, (x / x_scale).to(number_mk.dtype.element_ty), mask=k < WIDTH)
            scale = scale * x_scale
        tl.store(scale_m + row, scale)
    if BIASED:
        logit_e += tl.load(bias_e + e, mask=e < EXPERTS, other=0.0).to(tl.float32)
    # not a number counts as the least: every rank is taken once, whatever comes in
    logit_e = tl.where((e < EXPERTS) & (logit_e == logit_e), logit_e, -float("inf"))
    mine, other = logit_e[:, None], logit_e[None, :]
    is_better = (other > mine) | ((other == mine) & (e[None, :] < e[:, None]))
    rank_e = tl.sum(is_better.to(tl.int32), 1)
    is_chosen = rank_e < TOP_K
    share_e = tl.exp(logit_e - tl.max(logit_e, 0))
    total = tl.sum(tl.where(is_chosen | (not RENORMALIZE), share_e, 0.0), 0)
    tl.store(expert_mk + row * TOP_K + rank_e, e, mask=is_chosen)
    tl.store(weight_mk + row * TOP_K + rank_e, share_e / total, mask=is_chosen)


@triton.jit(do_not_specialize=["num_rows"])
def top_k_rows_kernel(
    logit_me,
    expert_mk,
    weight_mk,
    num_rows,
    EXPERTS: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """As top_k_kernel for BLOCK_M rows of finished logits, one choice after the other: less work, but in sequence."""
    row_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, EXPERTS_P2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_real = row_m < num_rows
    place = row_m.to(tl.int64)[:, None] * EXPERTS + e[None, :]
    is_logit = is_real[:, None] & (e < EXPERTS)[None, :]
    logit_me = tl.load(logit_me + place, mask=is_logit, other=float("-inf")).to(tl.float32) + 0.0  # -0 is 0
    logit_me = tl.where(logit_me == logit_me, logit_me, float("-inf"))
    bits_me = logit_me.to(tl.int32, bitcast=True)
    key_me = bits_me ^ ((bits_me >> 31) & 0x7FFFFFFF)  # integers in the order of the numbers
    share_me = tl.exp(logit_me - tl.max(logit_me, 1)[:, None])
    total_m = tl.sum(share_me, 1)
    if RENORMALIZE:
        is_chosen = key_me != key_me
        taken_me = key_me
        for _ in tl.static_range(TOP_K):
            is_best = e[None, :] == tl.argmax(taken_me, 1)[:, None]
            is_chosen = is_chosen | is_best
            taken_me = tl.where(is_best, -2147483648, taken_me)  # below the key of minus infinity
        total_m = tl.sum(tl.where(is_chosen, share_me, 0.0), 1)
    for choice in tl.static_range(TOP_K):
        best_m = tl.argmax(key_me, 1)
        is_best = e[None, :] == best_m[:, None]
        share_m = tl.sum(tl.where(is_best, share_me, 0.0), 1)
        tl.store(expert_mk + row_m * TOP_K + choice, best_m, mask=is_real)
        tl.store(weight_mk + row_m * TOP_K + choice, share_m / total_m, mask=is_real)
        key_me = tl.where(is_best, -2147483648, key_me)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    expert_f,
    count_pe,
    num_pairs,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """How many pairs of one chunk each expert has."""
    chunk = tl.program_id(0)
    f = chunk * CHUNK + tl.arange(0, CHUNK)
    e = tl.arange(0, BINS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(expert_f + f, mask=f < num_pairs, other=EXPERTS)
    tl.store(count_pe + chunk * EXPERTS + e, tl.histogram(expert, BINS), mask=e < EXPERTS)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "num_tiles"])
def sort_kernel(
    expert_f,
    count_pe,
    pair_s,
    expert_t,
    num_pairs,
    num_chunks,
    num_tiles,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,  # a power of two above EXPERTS
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
    GROUP: tl.constexpr,  # chunks that a program places
    PDL: tl.constexpr,
):
    """One expert's pairs among GROUP chunks, in order; of an expert's programs the first also marks its tiles, and of
    the last expert the tiles that nobody needs."""
    mine = tl.program_id(0)
    group = tl.program_id(1)
    e = tl.arange(0, BINS)
    f = tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count_e = tl.zeros([BINS], tl.int32)
    before_e = tl.zeros([BINS], tl.int32)  # of the chunks of programs before this one
    if COUNTED:
        ROWS: tl.constexpr = 16
        p = tl.arange(0, ROWS)
        for start in range(0, num_chunks, ROWS):
            is_count = (start + p < num_chunks)[:, None] & (e < EXPERTS)[None, :]
            place = (start + p)[:, None] * EXPERTS + e[None, :]
            count_pe_block = tl.load(count_pe + place, mask=is_count, other=0)
            count_e += tl.sum(count_pe_block, 0)
            before_e += tl.sum(tl.where((start + p < group * GROUP)[:, None], count_pe_block, 0), 0)
    else:
        for start in range(0, num_pairs, CHUNK):
            expert = tl.load(expert_f + start + f, mask=start + f < num_pairs, other=EXPERTS)
            count_e += tl.histogram(expert, BINS)
    tiles_e = tl.where(e < EXPERTS, (count_e + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(e < mine, tiles_e, 0), 0)
    end = first + tl.sum(tl.where(e == mine, tiles_e, 0), 0)
    if group == 0:
        for start in range(first, end, CHUNK):
            tl.store(expert_t + start + f, tl.zeros_like(f) + mine, mask=start + f < end)
        if mine == EXPERTS - 1:
            for start in range(end, num_tiles, CHUNK):
                tl.store(expert_t + start + f, tl.zeros_like(f) - 1, mask=start + f < num_tiles)
        rest = first * BLOCK_M + tl.sum(tl.where(e == mine, count_e, 0), 0) + tl.arange(0, BLOCK_M)
        tl.store(pair_s + rest, tl.zeros_like(rest) - 1, mask=rest < end * BLOCK_M)
    done = first * BLOCK_M + tl.sum(tl.where(e == mine, before_e, 0), 0)
    last = num_pairs
    if COUNTED:
        last = tl.minimum(num_pairs, (group + 1) * GROUP * CHUNK)
    for start in range(group * GROUP * CHUNK, last, CHUNK):
        is_mine = tl.load(expert_f + start + f, mask=start + f < num_pairs, other=EXPERTS) == mine
        place = done + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(pair_s + place, start + f, mask=is_mine)
        done += tl.sum(is_mine.to(tl.int32), 0)
