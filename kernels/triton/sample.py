"""The token of every row from its logits, without a sort: what kernels/reference/sample.py computes, in few launches.

    best     largest value and its id, a chunk of the vocabulary each: all that a greedy batch needs but `choose`
    level, refine, gather, bound    the least value that top-k, top-p and min-p keep (sample_limits.py)
    group    the weight kept of every 256 tokens
    choose   the races, or the best token; the row's new state

Weights are integers, so sums don't depend on chunks, and a row's token depends on neither the other rows nor on which
launches are left out because no row needs them.

Shape suffixes: r rows, c chunks, v tokens of a chunk, g groups, m members of a group, l levels, n gathered
values.
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
from octavo.kernels.triton.sample_limits import (
    GATHERED,
    LEVELS,
    REFINERS,
    SHORT_LIST,
    bound_kernel,
    gather_kernel,
    level_kernel,
    refine_kernel,
)
from octavo.kernels.triton.sample_weights import ARENA, clean, join, scaled, top_of, weigh

CHUNK_SIZES = ((8, 1024), (1 << 30, 2048))
"""(most rows, tokens of a chunk): small batches need short chunks to fill the device."""


class Choice(IntEnum):
    """What rows of a batch ask for at most."""

    GREEDY = 0
    PLAIN = 1
    """Draws from whole distributions."""
    LIMITED = 2
    """Draws with top-k, top-p or min-p."""


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=ARENA)
def best_kernel(
    logits_ptr, slot_ptr, divisor_ptr, random_ptr, k_ptr, p_ptr, value_ptr, id_ptr, limited_ptr, count_ptr, total_ptr,
    before_ptr, above_ptr, level_ptr, part_ptr, row_stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of a row: its largest value; the lowest id that has it, before temperature, which is 1 where that
    matters. Of the row: its temperature, or 0 without top-k and top-p; the sums of the other launches begin at 0."""
    join(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    id_v = chunk * CHUNK + tl.arange(0, CHUNK)
    x_v = clean(logits_ptr, row, row_stride, id_v, vocab_size)
    best = tl.max(x_v, 0)
    best_id = tl.min(tl.where(x_v == best, id_v, 2147483647), 0)
    slot = tl.load(slot_ptr + row)
    divisor = tl.load(divisor_ptr + slot)
    top = tl.div_rn(best, divisor)
    tl.store(value_ptr + row * num_chunks + chunk, tl.where(top == 0.0, 0.0, top))
    tl.store(id_ptr + row * num_chunks + chunk, tl.where(top > -float("inf"), best_id, chunk * CHUNK))
    if chunk == 0:
        is_limited = (tl.load(k_ptr + slot) < vocab_size) | (tl.load(p_ptr + slot) < 1.0)
        tl.store(limited_ptr + row, tl.where(tl.load(random_ptr + slot) & is_limited, divisor, 0.0))
        zero = tl.full([], 0, tl.int64)
        tl.store(count_ptr + row, 0)
        tl.store(total_ptr + row, zero)
        tl.store(before_ptr + row, zero)
        tl.store(above_ptr + row, zero)
        zero_l = tl.zeros([LEVELS], tl.int32)
        tl.store(level_ptr + row * LEVELS + tl.arange(0, LEVELS), zero_l)
        tl.store(part_ptr + row * LEVELS + tl.arange(0, LEVELS), zero_l)


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
    limited_r: Tensor
    """Temperatures of rows that are drawn with top-k or top-p, 0 of others."""
    count_r: Tensor
    total_r: Tensor
    before_r: Tensor
    above_r: Tensor
    level_rl: Tensor
    part_rl: Tensor
    range_rx: Tensor
    """Levels before and at the end of those where the bound lies, number of values before and in them."""
    listed_rx: Tensor
    """Number of values above those gathered, number gathered (or too many)."""
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
            limited_r=empty(max_rows, dtype=torch.float32),
            count_r=empty(max_rows, dtype=torch.int32),
            total_r=empty(max_rows, dtype=torch.int64),
            before_r=empty(max_rows, dtype=torch.int64),
            above_r=empty(max_rows, dtype=torch.int64),
            level_rl=empty(max_rows, LEVELS, dtype=torch.int32),
            part_rl=empty(max_rows, LEVELS, dtype=torch.int32),
            range_rx=empty(max_rows, 4, dtype=torch.int32),
            listed_rx=empty(max_rows, 2, dtype=torch.int32),
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
        "value_ptr": scratch.value_rc, "id_ptr": scratch.id_rc, "limited_ptr": scratch.limited_r,
        "count_ptr": scratch.count_r, "total_ptr": scratch.total_r, "before_ptr": scratch.before_r,
        "above_ptr": scratch.above_r,
        "level_ptr": scratch.level_rl, "part_ptr": scratch.part_rl, "range_ptr": scratch.range_rx,
        "listed_ptr": scratch.listed_rx, "list_ptr": scratch.list_rn, "bound_ptr": scratch.bound_r,
        "sum_ptr": scratch.sum_rg,
        "row_stride": logits_rv.stride(0), "out_stride": rows.output_r.stride(0), "vocab_size": vocab_size,
        "num_chunks": num_chunks, "num_groups": num_groups,
        "CHUNK": chunk, "CHUNKS": triton.next_power_of_2(num_chunks), "GROUPS": triton.next_power_of_2(num_groups),
        "GROUP": GROUP, "LEVELS": LEVELS, "GATHERED": GATHERED, "SHORT": min(SHORT_LIST, GATHERED // 2),
        "REFINERS": REFINERS, "TILE": 4096,
        "LIMITED": choice is Choice.LIMITED, "CHOICE": int(choice),
    }  # fmt: skip
    by_chunk, by_row = (num_chunks, num_rows), (num_rows,)

    def launch(kernel: Any, grid: tuple[int, ...], num_warps: int) -> Launch:
        named = {name: values[name] for name in kernel.arg_names if name != "PDL"}
        constants = {name: value for name, value in named.items() if name.isupper()}
        return Launch(kernel, grid, {name: named[name] for name in named.keys() - constants}, constants, num_warps)

    made = [launch(best_kernel, by_chunk, chunk // 512)]
    if choice is Choice.LIMITED:
        made.append(launch(level_kernel, by_chunk, chunk // 512))
        made.append(launch(refine_kernel, (min(REFINERS, num_chunks), num_rows), 4))
        made.append(launch(gather_kernel, by_chunk, chunk // 512))
        made.append(launch(bound_kernel, by_row, 8))
    if choice is not Choice.GREEDY:
        made.append(launch(group_kernel, by_chunk, chunk // 512))
    return [*made, launch(choose_kernel, by_row, 1 if choice is Choice.GREEDY else 8)]


def sample(
    logits_rv: Tensor, rows: Rows, slots: SlotParameters, scratch: Scratch, choice: Choice, *, pdl: bool
) -> Tensor:
    """int64 [r]: as `kernels.reference.sample.sample`; the tokens also go where `rows` says. The result is a part of
    the scratch."""
    for launch in launches(logits_rv, rows, slots, scratch, choice):
        launch.run(pdl=pdl)
    return scratch.token_r[: logits_rv.shape[0]]
