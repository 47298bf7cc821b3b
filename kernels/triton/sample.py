"""The token of every row from its logits, without a sort: what kernels/reference/sample.py computes, in few launches.

    best     largest value and its id, a chunk of the vocabulary each      all that a greedy batch needs but `choose`
    levels   how many tokens, and how much weight, lie within 16 depths below the row's best
    refine   the same within 16 parts of the depth where the bound lies, if too many values lie there
    gather   the values where the bound may lie; of those above (if only top-p asks) their weight alone
    bound    the least value kept, by bisection: over the gathered values, or over all when they still are too many
    groups   the weight kept of every 256 tokens
    choose   the races, or the best token; the row's new state

Weights are integers, so sums don't depend on chunks, and a row's token depends on neither the other rows nor on which
launches are left out because no row needs them.

Shape suffixes: r rows, c chunks, v tokens of a chunk, g groups, m members of a group, l levels, n gathered values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.sample import GROUP, SlotParameters
from octavo.kernels.triton.launch import Launch

LEVELS = 16
GATHERED = 8192
"""Values that a row can gather; rows with more search all logits, which is slow: thousands of (nearly) equal ones."""
CHUNK_SIZES = ((8, 1024), (32, 2048), (1 << 30, 4096))
"""(most rows, tokens of a chunk): small batches need short chunks to fill the device."""
ARENA = ["slot_ptr", "position_ptr", "out_ptr"]
"""Pointers into arrays of the caller's, anywhere."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
WEIGHT = tl.constexpr(1099511627776.0)
ONE = tl.constexpr(1 << 44)
"""A count of one in a level's packed sum; below it are weights without their last 14 bits."""
COUNT_BIT = tl.constexpr(44)
MASS_SHIFT = tl.constexpr(14)


class Choice(IntEnum):
    """What rows of a batch ask for at most."""

    GREEDY = 0
    PLAIN = 1
    """Draws from whole distributions."""
    LIMITED = 2
    """Draws with top-k, top-p or min-p."""


@triton.jit
def scaled(logits_ptr, row, row_stride, id_v, vocab_size, divisor):
    """Clean logits over the temperature; zeros have no sign."""
    x_v = tl.load(logits_ptr + row.to(tl.int64) * row_stride + id_v, mask=id_v < vocab_size, other=-float("inf"))
    x_v = tl.div_rn(tl.where(x_v == x_v, tl.minimum(x_v, 1e30), -float("inf")), divisor)
    return tl.where(x_v == 0.0, 0.0, x_v)


@triton.jit
def weigh(x_v, top):
    """int64: floor(exp(x - top) * 2^40)."""
    return (tl.exp(x_v - tl.maximum(top, LOWEST)) * WEIGHT).to(tl.int64)


@triton.jit
def ordered(x_v):
    """int32 keys in the order of the values."""
    bits_v = x_v.to(tl.int32, bitcast=True)
    return tl.where(bits_v < 0, bits_v ^ 0x7FFFFFFF, bits_v)


@triton.jit
def top_of(value_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    """A row's largest value."""
    chunk_c = tl.arange(0, CHUNKS)
    return tl.max(tl.load(value_ptr + row * num_chunks + chunk_c, mask=chunk_c < num_chunks, other=-float("inf")), 0)


@triton.jit
def join(PDL: tl.constexpr):
    """Wait for the kernel before, let the next one start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=ARENA)
def best_kernel(
    logits_ptr, slot_ptr, divisor_ptr, value_ptr, id_ptr, count_ptr, above_ptr, row_stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of a row: its largest value, the lowest id that has it."""
    join(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    divisor = tl.load(divisor_ptr + tl.load(slot_ptr + row))
    id_v = chunk * CHUNK + tl.arange(0, CHUNK)
    x_v = scaled(logits_ptr, row, row_stride, id_v, vocab_size, divisor)
    top = tl.max(x_v, 0)
    tl.store(value_ptr + row * num_chunks + chunk, top)
    tl.store(id_ptr + row * num_chunks + chunk, tl.min(tl.where(x_v == top, id_v, 2147483647), 0))
    if chunk == 0:
        tl.store(count_ptr + row, 0)
        tl.store(above_ptr + row, tl.full([], 0, tl.int64))


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=ARENA)
def level_kernel(
    logits_ptr, slot_ptr, divisor_ptr, random_ptr, k_ptr, p_ptr, value_ptr, total_ptr, level_ptr,
    row_stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of a row with top-k or top-p: its weight, and packed count and weight within every depth."""
    join(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    if tl.load(random_ptr + slot) & ((tl.load(k_ptr + slot) < vocab_size) | (tl.load(p_ptr + slot) < 1.0)):
        top = tl.maximum(top_of(value_ptr, row, num_chunks, CHUNKS), LOWEST)
        id_v = chunk * CHUNK + tl.arange(0, CHUNK)
        x_v = scaled(logits_ptr, row, row_stride, id_v, vocab_size, tl.load(divisor_ptr + slot))
        weight_v = weigh(x_v, top)
        tl.store(total_ptr + row * num_chunks + chunk, tl.sum(weight_v, 0))
        packed_v = (weight_v >> MASS_SHIFT) + ONE
        for i in tl.static_range(LEVELS):
            within_v = x_v - top > -(i + 1.0 + (2.0 * (i - 9) if i > 9 else 0.0))
            tl.store(level_ptr + (row * num_chunks + chunk) * LEVELS + i, tl.sum(tl.where(within_v, packed_v, 0), 0))


@triton.jit
def sums_within(packed_ptr, row, num_chunks, CHUNKS: tl.constexpr, LEVELS: tl.constexpr):
    """(counts, weights without their last bits) of a row within every level, from those of its chunks."""
    chunk_c = tl.arange(0, CHUNKS)
    level_l = tl.arange(0, LEVELS)
    packed_cl = tl.load(
        packed_ptr + (row * num_chunks + chunk_c)[:, None] * LEVELS + level_l[None, :],
        mask=(chunk_c < num_chunks)[:, None], other=0,
    )  # fmt: skip
    return tl.sum(packed_cl >> COUNT_BIT, 0), tl.sum(packed_cl & (ONE - 1), 0) << MASS_SHIFT


@triton.jit
def bracket(count_l, mass_l, k, needed, vocab_size, LEVELS: tl.constexpr):
    """(last level that surely holds less than is asked for, or -1; first one that surely holds enough), within which
    the bound lies. With top-k, top-p asks for a part of what top-k keeps: then all above counts, so it is -1."""
    level_l = tl.arange(0, LEVELS)
    is_count = k < vocab_size
    enough_l = tl.where(is_count, count_l >= k, mass_l.to(tl.float64) >= needed * 1.000000001)
    inner = tl.min(tl.where(enough_l, level_l, LEVELS - 1), 0)
    most_l = (mass_l + (count_l << MASS_SHIFT)).to(tl.float64)
    short_l = (most_l < needed) & (level_l < inner) & (k >= vocab_size)
    return tl.max(tl.where(short_l, level_l, -1), 0), inner


@triton.jit
def depth_of(level):
    """How deep below the best value a level reaches; 0 for level -1. Past the last one nothing has weight."""
    return (level + 1 + 2 * tl.maximum(level - 9, 0)).to(tl.float32)


@triton.jit
def at(value_l, level, LEVELS: tl.constexpr):
    """A level's sum; 0 for level -1."""
    return tl.sum(tl.where(tl.arange(0, LEVELS) == level, value_l, 0), 0)


@triton.jit
def needed_of(total_ptr, row, p, num_chunks, CHUNKS: tl.constexpr):
    """The weight that top-p asks for."""
    chunk_c = tl.arange(0, CHUNKS)
    total_c = tl.load(total_ptr + row * num_chunks + chunk_c, mask=chunk_c < num_chunks, other=0)
    return p * tl.sum(total_c, 0).to(tl.float64)


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=ARENA)
def refine_kernel(
    logits_ptr, slot_ptr, divisor_ptr, random_ptr, k_ptr, p_ptr, value_ptr, total_ptr, level_ptr, part_ptr,
    row_stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr, GATHERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of a row with too many values between the depths where its bound lies: packed count and weight within
    16 parts of that range."""
    join(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    k = tl.load(k_ptr + slot)
    p = tl.load(p_ptr + slot)
    if tl.load(random_ptr + slot) & ((k < vocab_size) | (p < 1.0)):
        needed = needed_of(total_ptr, row, p, num_chunks, CHUNKS)
        count_l, mass_l = sums_within(level_ptr, row, num_chunks, CHUNKS, LEVELS)
        outer, inner = bracket(count_l, mass_l, k, needed, vocab_size, LEVELS)
        if at(count_l, inner, LEVELS) - at(count_l, outer, LEVELS) > GATHERED:
            top = tl.maximum(top_of(value_ptr, row, num_chunks, CHUNKS), LOWEST)
            id_v = chunk * CHUNK + tl.arange(0, CHUNK)
            x_v = scaled(logits_ptr, row, row_stride, id_v, vocab_size, tl.load(divisor_ptr + slot))
            high = depth_of(outer)
            width = (depth_of(inner) - high) / LEVELS
            packed_v = tl.where(x_v - top > -high, 0, (weigh(x_v, top) >> MASS_SHIFT) + ONE)
            for i in tl.static_range(LEVELS):
                within_v = x_v - top > -(high + (i + 1) * width)
                tl.store(part_ptr + (row * num_chunks + chunk) * LEVELS + i, tl.sum(tl.where(within_v, packed_v, 0), 0))


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=ARENA)
def gather_kernel(
    logits_ptr, slot_ptr, divisor_ptr, random_ptr, k_ptr, p_ptr, value_ptr, total_ptr, level_ptr, part_ptr, count_ptr,
    above_ptr, list_ptr, row_stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr, GATHERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of a row with top-k or top-p: append the values where the bound may lie to the row's list, in any
    order, and add the weight of those above."""
    join(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    k = tl.load(k_ptr + slot)
    p = tl.load(p_ptr + slot)
    if tl.load(random_ptr + slot) & ((k < vocab_size) | (p < 1.0)):
        needed = needed_of(total_ptr, row, p, num_chunks, CHUNKS)
        count_l, mass_l = sums_within(level_ptr, row, num_chunks, CHUNKS, LEVELS)
        outer, inner = bracket(count_l, mass_l, k, needed, vocab_size, LEVELS)
        high = depth_of(outer)
        low = depth_of(inner)
        count = at(count_l, outer, LEVELS)
        if at(count_l, inner, LEVELS) - count > GATHERED:
            width = (low - high) / LEVELS
            part_l, part_mass_l = sums_within(part_ptr, row, num_chunks, CHUNKS, LEVELS)
            mass = at(mass_l, outer, LEVELS)
            outer, inner = bracket(count + part_l, mass + part_mass_l, k, needed, vocab_size, LEVELS)
            low = high + (inner + 1) * width
            high = high + (outer + 1) * width
        top = tl.maximum(top_of(value_ptr, row, num_chunks, CHUNKS), LOWEST)
        if tl.load(value_ptr + row * num_chunks + chunk) - top > -low:
            id_v = chunk * CHUNK + tl.arange(0, CHUNK)
            x_v = scaled(logits_ptr, row, row_stride, id_v, vocab_size, tl.load(divisor_ptr + slot))
            above_v = x_v - top > -high
            taken_v = ((x_v - top > -low) & (above_v == 0)).to(tl.int32)
            place_v = tl.atomic_add(count_ptr + row, tl.sum(taken_v, 0)) + tl.cumsum(taken_v, 0) - taken_v
            fits_v = (taken_v != 0) & (place_v < GATHERED)
            tl.store(list_ptr + row.to(tl.int64) * GATHERED + place_v, x_v, mask=fits_v)
            tl.atomic_add(above_ptr + row, tl.sum(tl.where(above_v, weigh(x_v, top), 0), 0))


@triton.jit
def bound_of_list(key_n, weight_n, above, total, k, p, high, vocab_size):
    """The least key v of the list with fewer than k keys above it, and less weight above it than p of the mass. Values
    above those of the list weigh `above`."""
    low = tl.min(tl.where(weight_n >= 0, key_n, high), 0).to(tl.int64)
    last = high.to(tl.int64)
    mass = total
    if k < vocab_size:
        right = last
        while low < right:
            middle = (low + right) >> 1
            few = tl.sum((key_n > middle).to(tl.int32), 0) < k
            right = tl.where(few, middle, right)
            low = tl.where(few, low, middle + 1)
        above_n = key_n > low
        tied = tl.max(tl.where(key_n == low, weight_n, 0), 0)
        num_tied = tl.sum((key_n == low).to(tl.int32), 0)
        num_left = tl.minimum(k - tl.sum(above_n.to(tl.int32), 0), num_tied)
        mass = tl.sum(tl.where(above_n, weight_n, 0), 0) + num_left * tied
    if p < 1.0:
        needed = p * mass.to(tl.float64)
        right = last
        while low < right:
            middle = (low + right) >> 1
            light = (above + tl.sum(tl.where(key_n > middle, weight_n, 0), 0)).to(tl.float64) < needed
            right = tl.where(light, middle, right)
            low = tl.where(light, low, middle + 1)
    return low


@triton.jit
def sums_of_all(logits_ptr, row, row_stride, vocab_size, divisor, top, middle, TILE: tl.constexpr):
    """(number of keys above, their weight, number of keys equal, one's weight) over a whole row."""
    count_v = tl.zeros([TILE], tl.int32)
    mass_v = tl.zeros([TILE], tl.int64)
    equal_v = tl.zeros([TILE], tl.int32)
    tied_v = tl.zeros([TILE], tl.int64)
    for start in range(0, vocab_size, TILE):
        id_v = start + tl.arange(0, TILE)
        x_v = scaled(logits_ptr, row, row_stride, id_v, vocab_size, divisor)
        key_v = ordered(x_v)
        weight_v = weigh(x_v, top)
        count_v += (key_v > middle).to(tl.int32)
        mass_v += tl.where(key_v > middle, weight_v, 0)
        same_v = (key_v == middle) & (id_v < vocab_size)
        equal_v += same_v.to(tl.int32)
        tied_v = tl.maximum(tied_v, tl.where(same_v, weight_v, 0))
    return tl.sum(count_v, 0), tl.sum(mass_v, 0), tl.sum(equal_v, 0), tl.max(tied_v, 0)


@triton.jit
def bound_of_all(logits_ptr, row, row_stride, vocab_size, divisor, top, total, k, p, TILE: tl.constexpr):
    """As `bound_of_list`, over a whole row; what has no weight may be kept or not."""
    low = ordered(top - 28.0).to(tl.int64)
    last = ordered(top).to(tl.int64)
    mass = total
    if k < vocab_size:
        right = last
        while low < right:
            middle = (low + right) >> 1
            count, _, _, _ = sums_of_all(logits_ptr, row, row_stride, vocab_size, divisor, top, middle, TILE)
            right = tl.where(count < k, middle, right)
            low = tl.where(count < k, low, middle + 1)
        count, above, num_tied, tied = sums_of_all(logits_ptr, row, row_stride, vocab_size, divisor, top, low, TILE)
        mass = above + tl.minimum(k - count, num_tied) * tied
    if p < 1.0:
        needed = p * mass.to(tl.float64)
        right = last
        while low < right:
            middle = (low + right) >> 1
            _, above, _, _ = sums_of_all(logits_ptr, row, row_stride, vocab_size, divisor, top, middle, TILE)
            light = above.to(tl.float64) < needed
            right = tl.where(light, middle, right)
            low = tl.where(light, low, middle + 1)
    return low


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=ARENA)
def bound_kernel(
    logits_ptr, slot_ptr, divisor_ptr, random_ptr, k_ptr, p_ptr, min_p_ptr, value_ptr, total_ptr, count_ptr, above_ptr,
    list_ptr, bound_ptr, row_stride, vocab_size, num_chunks,
    TILE: tl.constexpr, CHUNKS: tl.constexpr, GATHERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: the least value that top-k, top-p and min-p keep; -inf without limits."""
    join(PDL)
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    if tl.load(random_ptr + slot):
        k = tl.load(k_ptr + slot)
        p = tl.load(p_ptr + slot)
        top = top_of(value_ptr, row, num_chunks, CHUNKS)
        bound = top + tl.load(min_p_ptr + slot)
        if ((k < vocab_size) | (p < 1.0)) & (top > -float("inf")):
            chunk_c = tl.arange(0, CHUNKS)
            total_c = tl.load(total_ptr + row * num_chunks + chunk_c, mask=chunk_c < num_chunks, other=0)
            total = tl.sum(total_c, 0)
            count = tl.load(count_ptr + row)
            if count <= GATHERED:
                place_n = tl.arange(0, GATHERED)
                x_n = tl.load(list_ptr + row.to(tl.int64) * GATHERED + place_n, mask=place_n < count, other=0.0)
                key_n = tl.where(place_n < count, ordered(x_n), -2147483648)
                weight_n = tl.where(place_n < count, weigh(x_n, top), -1)
                above = tl.load(above_ptr + row)
                key = bound_of_list(key_n, weight_n, above, total, k, p, ordered(top), vocab_size)
            else:
                divisor = tl.load(divisor_ptr + slot)
                key = bound_of_all(logits_ptr, row, row_stride, vocab_size, divisor, top, total, k, p, TILE)
            bits = key.to(tl.int32)
            bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            bound = tl.maximum(bound, bits.to(tl.float32, bitcast=True))
        tl.store(bound_ptr + row, bound)


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=ARENA)
def group_kernel(
    logits_ptr, slot_ptr, divisor_ptr, random_ptr, value_ptr, bound_ptr, sum_ptr,
    row_stride, vocab_size, num_chunks, num_groups,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, LIMITED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of a row that is drawn: the weight kept of each of its groups."""
    join(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slot_ptr + row)
    if tl.load(random_ptr + slot):
        bound = -float("inf")
        if LIMITED:
            bound = tl.load(bound_ptr + row)
        group_g = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        sum_g = tl.zeros([CHUNK // GROUP], tl.int64)
        if tl.load(value_ptr + row * num_chunks + chunk) >= bound:
            top = top_of(value_ptr, row, num_chunks, CHUNKS)
            id_gm = group_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            x_gm = scaled(logits_ptr, row, row_stride, id_gm, vocab_size, tl.load(divisor_ptr + slot))
            sum_g = tl.sum(tl.where(x_gm >= bound, weigh(x_gm, top), 0), 1)
        tl.store(sum_ptr + row.to(tl.int64) * num_groups + group_g, sum_g, mask=group_g < num_groups)


@triton.jit
def race(weight_n, exists_n, seed, index, position, column_n):
    """The column (counted from the first) with the largest weight / E, the first one on ties."""
    zero_n = (column_n * 0).to(tl.uint32)
    first_n, second_n, _, _ = tl.philox(
        seed, zero_n + position.to(tl.uint32), zero_n + index.to(tl.uint32), column_n.to(tl.uint32), zero_n, n_rounds=10
    )
    bits_n = (first_n.to(tl.int64) << 21) + (second_n >> 11).to(tl.int64)
    uniform_n = bits_n.to(tl.float64) * 1.1102230246251565e-16  # 2^-53, exact in fp32 too
    exponential_n = tl.where(bits_n == 0, 5.551115123125783e-17, -tl.log(1.0 - uniform_n))  # 2^-54 for 0
    score_n = tl.where(exists_n, weight_n.to(tl.float64) / exponential_n, -1.0)
    place_n = column_n - tl.min(column_n, 0)
    return tl.min(tl.where(score_n == tl.max(score_n, 0), place_n, 2147483647), 0)


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=ARENA)
def choose_kernel(
    logits_ptr, slot_ptr, position_ptr, divisor_ptr, random_ptr, seed_ptr, index_ptr, value_ptr, id_ptr, bound_ptr,
    sum_ptr, token_ptr, last_ptr, out_ptr, row_stride, out_stride, vocab_size, num_chunks, num_groups,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CHOICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: its token, as int64, as its slot's newest, and for the host."""
    join(PDL)
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    chunk_c = tl.arange(0, CHUNKS)
    exists_c = chunk_c < num_chunks
    value_c = tl.load(value_ptr + row * num_chunks + chunk_c, mask=exists_c, other=-float("inf"))
    id_c = tl.load(id_ptr + row * num_chunks + chunk_c, mask=exists_c, other=2147483647)
    top = tl.max(value_c, 0)
    token = tl.min(tl.where(value_c == top, id_c, 2147483647), 0)
    if CHOICE > 0:  # noqa: SIM102 (one condition is known at compile time)
        if tl.load(random_ptr + slot) & (top > -float("inf")):
            seed = tl.load(seed_ptr + slot)
            index = tl.load(index_ptr + slot)
            position = tl.load(position_ptr + row)
            group_g = tl.arange(0, GROUPS)
            exists_g = group_g < num_groups
            sum_g = tl.load(sum_ptr + row.to(tl.int64) * num_groups + group_g, mask=exists_g, other=0)
            group = race(sum_g, exists_g, seed, index, position, group_g)
            member_m = tl.arange(0, GROUP)
            id_m = group * GROUP + member_m
            x_m = scaled(logits_ptr, row, row_stride, id_m, vocab_size, tl.load(divisor_ptr + slot))
            weight_m = weigh(x_m, top)
            if CHOICE > 1:
                weight_m = tl.where(x_m >= tl.load(bound_ptr + row), weight_m, 0)
            token = group * GROUP + race(weight_m, id_m < vocab_size, seed, index, position, num_groups + member_m)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(last_ptr + slot, token)
    tl.store(out_ptr + row * out_stride, token)


@dataclass(frozen=True)
class Scratch:
    """What the kernels hand each other, for up to `max_rows` rows; a later call may use it when an earlier one has
    ended."""

    value_rc: Tensor
    id_rc: Tensor
    total_rc: Tensor
    level_rcl: Tensor
    part_rcl: Tensor
    count_r: Tensor
    above_r: Tensor
    list_rn: Tensor
    bound_r: Tensor
    sum_rg: Tensor
    token_r: Tensor

    @classmethod
    def allocate(cls, max_rows: int, vocab_size: int, device: torch.device) -> Scratch:
        chunks = max(min(max_rows, most) * triton.cdiv(vocab_size, chunk) for most, chunk in CHUNK_SIZES)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            value_rc=empty(chunks, dtype=torch.float32),
            id_rc=empty(chunks, dtype=torch.int32),
            total_rc=empty(chunks, dtype=torch.int64),
            level_rcl=empty(chunks * LEVELS, dtype=torch.int64),
            part_rcl=empty(chunks * LEVELS, dtype=torch.int64),
            count_r=empty(max_rows, dtype=torch.int32),
            above_r=empty(max_rows, dtype=torch.int64),
            list_rn=empty(max_rows, GATHERED, dtype=torch.float32),
            bound_r=empty(max_rows, dtype=torch.float32),
            sum_rg=empty(max_rows, triton.cdiv(vocab_size, GROUP), dtype=torch.int64),
            token_r=empty(max_rows, dtype=torch.int64),
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows are sampled, and where their tokens go (besides `Scratch.token_r`)."""

    slot_r: Tensor
    """int32 or int64"""
    position_r: Tensor
    """int32 or int64: the position that the new token takes."""
    last_token_s: Tensor
    """int32 [slots]"""
    output_r: Tensor
    """int32, any stride"""


def launches(logits_rv: Tensor, rows: Rows, slots: SlotParameters, scratch: Scratch, choice: Choice) -> list[Launch]:
    """What to launch, in order, for float32 logits with dense rows; `choice` covers what the rows ask for."""
    num_rows, vocab_size = logits_rv.shape
    chunk = next(size for most, size in CHUNK_SIZES if num_rows <= most)
    num_chunks, num_groups = triton.cdiv(vocab_size, chunk), triton.cdiv(vocab_size, GROUP)
    values: dict[str, Any] = {
        "logits_ptr": logits_rv, "slot_ptr": rows.slot_r, "position_ptr": rows.position_r,
        "last_ptr": rows.last_token_s, "out_ptr": rows.output_r, "token_ptr": scratch.token_r,
        "divisor_ptr": slots.divisor_s, "random_ptr": slots.random_s, "k_ptr": slots.k_s, "p_ptr": slots.p_s,
        "min_p_ptr": slots.min_p_log_s, "seed_ptr": slots.seed_s, "index_ptr": slots.index_s,
        "value_ptr": scratch.value_rc, "id_ptr": scratch.id_rc, "total_ptr": scratch.total_rc,
        "level_ptr": scratch.level_rcl, "part_ptr": scratch.part_rcl, "above_ptr": scratch.above_r,
        "count_ptr": scratch.count_r, "list_ptr": scratch.list_rn,
        "bound_ptr": scratch.bound_r, "sum_ptr": scratch.sum_rg,
        "row_stride": logits_rv.stride(0), "out_stride": rows.output_r.stride(0), "vocab_size": vocab_size,
        "num_chunks": num_chunks, "num_groups": num_groups,
        "CHUNK": chunk, "CHUNKS": triton.next_power_of_2(num_chunks), "GROUPS": triton.next_power_of_2(num_groups),
        "GROUP": GROUP, "LEVELS": LEVELS, "GATHERED": GATHERED, "TILE": 4096,
        "LIMITED": choice is Choice.LIMITED, "CHOICE": int(choice),
    }  # fmt: skip
    by_chunk, by_row = (num_chunks, num_rows), (num_rows,)

    def launch(kernel: Any, grid: tuple[int, ...], num_warps: int) -> Launch:
        named = {name: values[name] for name in kernel.arg_names if name != "PDL"}
        constants = {name: value for name, value in named.items() if name.isupper()}
        return Launch(kernel, grid, {name: named[name] for name in named.keys() - constants}, constants, num_warps)

    warps = chunk // 512
    made = [launch(best_kernel, by_chunk, max(warps // 2, 2))]
    if choice is Choice.LIMITED:
        made.append(launch(level_kernel, by_chunk, warps))
        made.append(launch(refine_kernel, by_chunk, 2 * warps))
        made.append(launch(gather_kernel, by_chunk, 2 * warps))
        made.append(launch(bound_kernel, by_row, 16))
    if choice is not Choice.GREEDY:
        made.append(launch(group_kernel, by_chunk, warps))
    return [*made, launch(choose_kernel, by_row, 8)]


def sample(
    logits_rv: Tensor, rows: Rows, slots: SlotParameters, scratch: Scratch, choice: Choice, *, pdl: bool
) -> Tensor:
    """int64 [r]: as `kernels.reference.sample.sample`; the tokens also go where `rows` says. The result is a part of
    the scratch."""
    for launch in launches(logits_rv, rows, slots, scratch, choice):
        launch.run(pdl=pdl)
    return scratch.token_r[: logits_rv.shape[0]]
