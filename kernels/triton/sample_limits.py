"""The least value of a row that top-k, top-p and min-p keep, without a sort: four of the launches of sample.py.

    level    how many values lie in each of 64 levels of depth below the row's best; the weight of all
    refine   between which levels the bound lies; if too many values lie there, how many in each of 64 parts of them
    gather   the values where the bound may lie; of those above their number and, for top-p, their weight
    bound    the least value kept, by bisection: over the gathered values, or over all when they still are too many

A level's values weigh at least so many times what one at its far edge weighs, and at most what as many at its near edge
do. Since the weight of all is known, what lies deeper says as much of what lies above: the tail of a nucleus is small,
and so is the doubt. No chunk adds anything but integers.

Shape suffixes: v tokens of a chunk, c chunks, l levels or parts, n gathered values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.sample_weights import ARENA, LOWEST, WEIGHT, join, ordered, scaled, top_of, weigh

LEVELS = 64
"""Of a depth of 1/4, those after the 48th of 1: to 28, past which nothing has weight."""
REFINERS = 8
"""Programs a row that refine."""
GATHERED = 4096
"""Values that a row can gather; rows with more search all logits, which is slow: thousands of (nearly) equal ones."""
SHORT_LIST = 512
"""Lists up to this long are searched with fewer registers."""
SLACK = tl.constexpr(1e-5)
"""More than rounding can move a weight by, relatively."""


@triton.jit
def level_of(depth_v):
    """int32: the level of a value so far below the best; 64 for what has no weight."""
    depth_v = tl.minimum(depth_v, 28.0)
    return tl.minimum(depth_v * 4.0, depth_v + 36.0).to(tl.int32)


@triton.jit
def edge_of(level):
    """fp32: the depth at which a level begins."""
    return tl.maximum(level * 0.25, level - 36.0)


@triton.jit
def part_of(depth_v, near, scale, LEVELS: tl.constexpr):
    """int32: the part of a value within the levels that begin at `near`; `scale` parts have a depth of 1."""
    return tl.minimum(tl.maximum((tl.minimum(depth_v, 28.0) - near) * scale, 0.0), LEVELS - 1.0).to(tl.int32)


@triton.jit
def upto(value_l, level, LEVELS: tl.constexpr):
    """The sum of a level and of those before it; 0 for level -1."""
    return tl.sum(tl.where(tl.arange(0, LEVELS) <= level, value_l, 0), 0)


@triton.jit
def bracket(
    count_l, near_l, far_l, num_before, before, total, k, p, vocab_size, IS_ALL: tl.constexpr, LEVELS: tl.constexpr
):
    """(last level that surely holds less than is asked for, or -1; first one that surely holds enough): the bound lies
    after the one, up to the other. Before level 0 come `num_before` values that weigh `before`; nothing comes after the
    last one if IS_ALL. A top-k of more values than there are is none; top-p asks for a part of what top-k keeps."""
    level_l = tl.arange(0, LEVELS)
    num_l = num_before + tl.cumsum(count_l, 0)
    most_l = before + tl.cumsum(count_l * (tl.exp(-near_l).to(tl.float64) * (WEIGHT * (1.0 + SLACK)) + 1.0), 0)
    least_each_l = tl.exp(-far_l).to(tl.float64) * (WEIGHT * (1.0 - SLACK)) - 1.0
    least_l = before + tl.cumsum(count_l * tl.maximum(least_each_l, 0.0), 0)
    if IS_ALL:
        below_l = tl.max(least_l, 0) - least_l
        least_l = tl.maximum(least_l, total - (tl.max(most_l, 0) - most_l))
        most_l = tl.minimum(most_l, total - below_l)
    has_k = (k < vocab_size) & (tl.max(num_l, 0) >= k)
    inner = tl.min(tl.where(tl.where(has_k, num_l >= k, least_l >= p * total), level_l, LEVELS - 1), 0)
    kept = tl.max(tl.where(level_l < inner, least_l, before), 0)
    needed = p * tl.where(has_k, kept, total)
    short_l = tl.where(p < 1.0, most_l < needed, num_l < k) & (level_l < inner)
    return tl.max(tl.where(short_l, level_l, -1), 0), inner


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=ARENA)
def level_kernel(
    logits_ptr, limited_ptr, value_ptr, total_ptr, level_ptr, row_stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of a row with top-k or top-p: adds its weight, and how many values it has in every level."""
    join(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    divisor = tl.load(limited_ptr + row)
    if divisor > 0:
        top = tl.maximum(top_of(value_ptr, row, num_chunks, CHUNKS), LOWEST)
        id_v = chunk * CHUNK + tl.arange(0, CHUNK)
        x_v = scaled(logits_ptr, row, row_stride, id_v, vocab_size, divisor)
        tl.atomic_add(total_ptr + row, tl.sum(weigh(x_v, top), 0))
        level_v = level_of(top - x_v)
        count_l = tl.histogram(level_v, LEVELS, mask=level_v < LEVELS)
        tl.atomic_add(level_ptr + row * LEVELS + tl.arange(0, LEVELS), count_l, mask=count_l > 0)


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=ARENA)
def refine_kernel(
    logits_ptr, slot_ptr, k_ptr, p_ptr, limited_ptr, value_ptr, total_ptr, level_ptr, part_ptr, before_ptr, range_ptr,
    row_stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr, GATHERED: tl.constexpr, REFINERS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some chunks of a row with top-k or top-p: the levels between which its bound lies, how many values are before and
    in them. If too many are in them: the weight before them, and how many are in each of their parts."""
    join(PDL)
    first = tl.program_id(0)
    row = tl.program_id(1)
    divisor = tl.load(limited_ptr + row)
    if divisor > 0:
        slot = tl.load(slot_ptr + row)
        k = tl.load(k_ptr + slot)
        p = tl.load(p_ptr + slot)
        level_l = tl.arange(0, LEVELS)
        level_count_l = tl.load(level_ptr + row * LEVELS + level_l)
        total = tl.load(total_ptr + row).to(tl.float64)
        near_l, far_l = edge_of(level_l), edge_of(level_l + 1)
        outer, inner = bracket(level_count_l, near_l, far_l, 0, 0.0, total, k, p, vocab_size, True, LEVELS)
        num_before = upto(level_count_l, outer, LEVELS)
        num_inside = upto(level_count_l, inner, LEVELS) - num_before
        if first == 0:
            tl.store(range_ptr + row * 4, outer)
            tl.store(range_ptr + row * 4 + 1, inner)
            tl.store(range_ptr + row * 4 + 2, num_before)
            tl.store(range_ptr + row * 4 + 3, num_inside)
        if num_inside > GATHERED:
            top = tl.maximum(top_of(value_ptr, row, num_chunks, CHUNKS), LOWEST)
            near = edge_of(outer + 1)
            scale = LEVELS / (edge_of(inner + 1) - near)
            count_l = tl.zeros([LEVELS], tl.int32)
            before_v = tl.zeros([CHUNK], tl.int64)
            for chunk in range(first, num_chunks, REFINERS):
                id_v = chunk * CHUNK + tl.arange(0, CHUNK)
                x_v = scaled(logits_ptr, row, row_stride, id_v, vocab_size, divisor)
                level_v = level_of(top - x_v)
                part_v = part_of(top - x_v, near, scale, LEVELS)
                count_l += tl.histogram(part_v, LEVELS, mask=(level_v > outer) & (level_v <= inner))
                before_v += tl.where(level_v <= outer, weigh(x_v, top), 0)
            tl.atomic_add(before_ptr + row, tl.sum(before_v, 0))
            tl.atomic_add(part_ptr + row * LEVELS + level_l, count_l, mask=count_l > 0)


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=ARENA)
def gather_kernel(
    logits_ptr, slot_ptr, k_ptr, p_ptr, limited_ptr, value_ptr, total_ptr, part_ptr, before_ptr, range_ptr, count_ptr,
    above_ptr, listed_ptr, list_ptr, row_stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr, GATHERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of a row with top-k or top-p: appends the values among which the bound is to the row's list, unless
    they are too many, and adds the weight of those above them."""
    join(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    divisor = tl.load(limited_ptr + row)
    if divisor > 0:
        outer = tl.load(range_ptr + row * 4)
        inner = tl.load(range_ptr + row * 4 + 1)
        num_above = tl.load(range_ptr + row * 4 + 2)
        num_listed = tl.load(range_ptr + row * 4 + 3)
        near = edge_of(outer + 1)
        scale = 0.0
        first_part = -1
        last_part = 0
        if num_listed > GATHERED:
            slot = tl.load(slot_ptr + row)
            part_l = tl.arange(0, LEVELS)
            count_l = tl.load(part_ptr + row * LEVELS + part_l)
            width = (edge_of(inner + 1) - near) / LEVELS
            scale = LEVELS / (edge_of(inner + 1) - near)
            first_part, last_part = bracket(
                count_l, near + part_l * width, near + (part_l + 1) * width, num_above,
                tl.load(before_ptr + row).to(tl.float64), tl.load(total_ptr + row).to(tl.float64),
                tl.load(k_ptr + slot), tl.load(p_ptr + slot), vocab_size, False, LEVELS,
            )  # fmt: skip
            num_outside = upto(count_l, first_part, LEVELS)
            num_listed = upto(count_l, last_part, LEVELS) - num_outside
            num_above += num_outside
        if chunk == 0:
            tl.store(listed_ptr + row * 2, num_above)
            tl.store(listed_ptr + row * 2 + 1, num_listed)
        top = tl.maximum(top_of(value_ptr, row, num_chunks, CHUNKS), LOWEST)
        best = tl.load(value_ptr + row * num_chunks + chunk)
        if (num_listed <= GATHERED) & (level_of(top - best) <= inner):
            id_v = chunk * CHUNK + tl.arange(0, CHUNK)
            x_v = scaled(logits_ptr, row, row_stride, id_v, vocab_size, divisor)
            level_v = level_of(top - x_v)
            part_v = tl.where(level_v <= inner, part_of(top - x_v, near, scale, LEVELS), LEVELS)
            part_v = tl.where(level_v <= outer, -1, part_v)
            taken_v = ((part_v > first_part) & (part_v <= last_part)).to(tl.int32)
            place_v = tl.atomic_add(count_ptr + row, tl.sum(taken_v, 0)) + tl.cumsum(taken_v, 0) - taken_v
            fits_v = (taken_v != 0) & (place_v < GATHERED)
            tl.store(list_ptr + row.to(tl.int64) * GATHERED + place_v, x_v, mask=fits_v)
            tl.atomic_add(above_ptr + row, tl.sum(tl.where(part_v <= first_part, weigh(x_v, top), 0), 0))


@triton.jit
def bound_of_list(list_ptr, num_listed, top, num_above, above, total, k, p, SIZE: tl.constexpr):
    """The least key of a list with fewer than k keys above it, and less weight above it than p of the mass; or that
    of LOWEST when nothing limits. `num_above` values above those of the list weigh `above`."""
    place_n = tl.arange(0, SIZE)
    is_listed_n = place_n < num_listed
    x_n = tl.load(list_ptr + place_n, mask=is_listed_n, other=0.0)
    key_n = tl.where(is_listed_n, ordered(x_n), -2147483648)
    weight_n = tl.where(is_listed_n, weigh(x_n, top), 0)
    low = tl.min(tl.where(is_listed_n, key_n, 2147483647), 0).to(tl.int64)
    last = tl.max(key_n, 0).to(tl.int64)
    mass = total
    has_k = num_above + num_listed >= k
    if has_k:
        right = last
        while low < right:
            middle = (low + right) >> 1
            few = num_above + tl.sum((key_n > middle).to(tl.int32), 0) < k
            right = tl.where(few, middle, right)
            low = tl.where(few, low, middle + 1)
        above_n = key_n > low
        tied = tl.max(tl.where(key_n == low, weight_n, 0), 0)
        num_tied = tl.sum((key_n == low).to(tl.int32), 0)
        num_left = tl.minimum(k - num_above - tl.sum(above_n.to(tl.int32), 0), num_tied)
        mass = above + tl.sum(tl.where(above_n, weight_n, 0), 0) + num_left * tied
    if p < 1.0:
        needed = p * mass.to(tl.float64)
        right = last
        while low < right:
            middle = (low + right) >> 1
            light = (above + tl.sum(tl.where(key_n > middle, weight_n, 0), 0)).to(tl.float64) < needed
            right = tl.where(light, middle, right)
            low = tl.where(light, low, middle + 1)
    return tl.where(has_k | (p < 1.0), low, -2139095040)


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
    logits_ptr, slot_ptr, divisor_ptr, random_ptr, k_ptr, p_ptr, min_p_ptr, value_ptr, total_ptr, above_ptr, listed_ptr,
    list_ptr, bound_ptr, row_stride, vocab_size, num_chunks,
    TILE: tl.constexpr, CHUNKS: tl.constexpr, GATHERED: tl.constexpr, SHORT: tl.constexpr, PDL: tl.constexpr,
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
            total = tl.load(total_ptr + row)
            num_above = tl.load(listed_ptr + row * 2)
            num_listed = tl.load(listed_ptr + row * 2 + 1)
            own_ptr = list_ptr + row.to(tl.int64) * GATHERED
            above = tl.load(above_ptr + row)
            if num_listed <= SHORT:
                key = bound_of_list(own_ptr, num_listed, top, num_above, above, total, k, p, SHORT)
            elif num_listed <= GATHERED:
                key = bound_of_list(own_ptr, num_listed, top, num_above, above, total, k, p, GATHERED)
            else:
                divisor = tl.load(divisor_ptr + slot)
                key = bound_of_all(logits_ptr, row, row_stride, vocab_size, divisor, top, total, k, p, TILE)
            bits = key.to(tl.int32)
            bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            bound = tl.maximum(bound, bits.to(tl.float32, bitcast=True))
        tl.store(bound_ptr + row, bound)
