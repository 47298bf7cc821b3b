"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2024). Rows of one token: a program a head, row and run of values
brings the state on by one. Other rows, in tiles, after section 3 (the WY form): what the tokens of a tile correct
depends on each other by a triangular system, which is inverted for all tiles at once; then a program a head and run of
values walks the row's tiles with the state in registers.

Shape suffixes: l tokens of a tile (s: those before), k key dim (padded), v values of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.gated_delta import EPS, DeltaShape, DeltaWeights
from octavo.kernels.reference.state_rows import StateRows
from octavo.kernels.triton.handles import launch
from octavo.kernels.triton.state_rows import (
    ROW_ARRAYS,
    decode_args,
    decode_blocks,
    is_counted,
    is_decode,
    output,
    precision,
    prompt_args,
    prompt_blocks,
    prompt_row,
    prompt_warps,
    softplus,
    tile_of,
)

LEAST = 16
"""Of a product's dims."""
DECODE_VALUES, VALUES = 32, 32
"""Of a program."""
NEAR = 16
"""Tokens of a tile that are solved for one after the other; a tile has at most four runs of them."""
TOKENS = 16
"""Of a program that scales queries or keys."""
UNALIGNED = [*ROW_ARRAYS, "strength_ptr", "step_ptr"]


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=UNALIGNED)
def decode_delta_kernel(
    x_ptr, strength_ptr, step_ptr, bias_ptr, decay_ptr, state_ptr, out_ptr,
    table_ptr, slot_ptr, length_ptr, rows_ptr, table_stride,
    X_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr, VALUE: tl.constexpr, TILE_V: tl.constexpr,
    BLOCK: tl.constexpr, EPS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """TILE_V values of one head of one row."""
    head = tl.program_id(0)
    row = tl.program_id(2)
    if is_decode(rows_ptr, row, COUNTED):
        position, read, write = decode_blocks(table_ptr, slot_ptr, length_ptr, row, table_stride, BLOCK)
        dim_k = tl.arange(0, KEY_PAD)
        dim_v = tl.program_id(1) * TILE_V + tl.arange(0, TILE_V)
        in_key, in_value = dim_k < KEY, dim_v < VALUE
        row_ptr = x_ptr + row.to(tl.int64) * X_STRIDE
        key_ptr = row_ptr + head // (HEADS // KEY_HEADS) * KEY + dim_k
        q_k = tl.load(key_ptr, mask=in_key, other=0.0).to(tl.float32)
        k_k = tl.load(key_ptr + KEY_HEADS * KEY, mask=in_key, other=0.0).to(tl.float32)
        q_k = q_k * (tl.rsqrt(tl.sum(q_k * q_k, 0) + EPS) * KEY**-0.5)
        k_k = k_k * tl.rsqrt(tl.sum(k_k * k_k, 0) + EPS)
        value = row_ptr + 2 * KEY_HEADS * KEY + head * VALUE + dim_v
        v_v = tl.load(value, mask=in_value, other=0.0).to(tl.float32)
        of_head = row.to(tl.int64) * HEAD_STRIDE + head
        strength = sigmoid(tl.load(strength_ptr + of_head).to(tl.float32))
        step = softplus(tl.load(step_ptr + of_head).to(tl.float32) + tl.load(bias_ptr + head))
        decay = tl.exp(-step * tl.exp(tl.load(decay_ptr + head)))
        place_kv = head * (KEY * VALUE) + dim_k[:, None] * VALUE + dim_v[None, :]
        mask_kv = in_key[:, None] & in_value[None, :]
        state_kv = tl.load(state_ptr + read * STATE_STRIDE + place_kv, mask=mask_kv & (position > 0), other=0.0)
        state_kv = state_kv * decay
        change_v = (v_v - tl.sum(state_kv * k_k[:, None], 0)) * strength
        state_kv += k_k[:, None] * change_v[None, :]
        tl.store(state_ptr + write * STATE_STRIDE + place_kv, state_kv, mask=mask_kv)
        out_v = tl.sum(state_kv * q_k[:, None], 0)
        out = out_ptr + row.to(tl.int64) * (HEADS * VALUE) + head * VALUE + dim_v
        tl.store(out, out_v.to(out_ptr.dtype.element_ty), mask=in_value)


@triton.jit
def tile_tokens(tile, start, begin, length, TILE: tl.constexpr):
    """(which positions of a tile are the row's, their tokens)."""
    position_l = tile * TILE + tl.arange(0, TILE)
    inside_l = (position_l >= begin) & (position_l < length)
    return inside_l, (start + position_l - begin).to(tl.int64)


@triton.jit
def tile_heads(
    strength_ptr, step_ptr, bias_ptr, decay_ptr, head, token_l, inside_l, HEAD_STRIDE: tl.constexpr
):  # fmt: skip
    """(strengths of corrections, logarithms of decays) of a tile's tokens; 0 where there is none."""
    of_head = token_l * HEAD_STRIDE + head
    strength_l = sigmoid(tl.load(strength_ptr + of_head, mask=inside_l, other=0.0).to(tl.float32))
    step_l = softplus(tl.load(step_ptr + of_head, mask=inside_l, other=0.0).to(tl.float32) + tl.load(bias_ptr + head))
    decay_l = -step_l * tl.exp(tl.load(decay_ptr + head))
    return tl.where(inside_l, strength_l, 0.0), tl.where(inside_l, decay_l, 0.0)


@triton.jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def unit_kernel(
    x_ptr, start_ptr, length_ptr, rows_ptr,
    X_STRIDE: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr, TOKENS: tl.constexpr,
    EPS: tl.constexpr, NUM_DECODES: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One head's queries or keys of TOKENS tokens of one row, in place: of unit length, queries then scaled."""
    _, start, begin, length = prompt_row(start_ptr, length_ptr, rows_ptr, tl.program_id(2), NUM_DECODES, COUNTED)
    index_l = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    dim_k = tl.arange(0, KEY_PAD)
    mask_lk = (index_l < length - begin)[:, None] & (dim_k < KEY)[None, :]
    head = tl.program_id(0)
    place_lk = ((start + index_l).to(tl.int64) * X_STRIDE)[:, None] + head * KEY + dim_k[None, :]
    x_lk = tl.load(x_ptr + place_lk, mask=mask_lk, other=0.0).to(tl.float32)
    scale = tl.where(head < KEY_HEADS, KEY**-0.5, 1.0)
    x_lk = x_lk * (tl.rsqrt(tl.sum(x_lk * x_lk, 1) + EPS) * scale)[:, None]
    tl.store(x_ptr + place_lk, x_lk.to(x_ptr.dtype.element_ty), mask=mask_lk)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=UNALIGNED)
def invert_kernel(
    x_ptr, strength_ptr, step_ptr, bias_ptr, decay_ptr, inverse_ptr,
    table_ptr, slot_ptr, start_ptr, length_ptr, rows_ptr, table_stride,
    X_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    KEY: tl.constexpr, KEY_PAD: tl.constexpr, NEAR: tl.constexpr, TILE: tl.constexpr, NUM_DECODES: tl.constexpr,
    COUNTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inverse of one tile's system in one head, to the tile's tokens' rows of `inverse` [t, HEADS, TILE]: within
    runs of NEAR tokens row by row by forward substitution, then the runs together by products."""
    head = tl.program_id(0)
    _, start, begin, length = prompt_row(start_ptr, length_ptr, rows_ptr, tl.program_id(2), NUM_DECODES, COUNTED)
    tile = begin // TILE + tl.program_id(1)
    if tile * TILE < length:
        inside_l, token_l = tile_tokens(tile, start, begin, length, TILE)
        strength_l, decay_l = tile_heads(
            strength_ptr, step_ptr, bias_ptr, decay_ptr, head, token_l, inside_l, HEAD_STRIDE
        )
        dim_k = tl.arange(0, KEY_PAD)
        mask_lk = inside_l[:, None] & (dim_k < KEY)[None, :]
        key_ptr = x_ptr + (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY + dim_k[None, :]
        k_lk = tl.load(key_ptr + (token_l * X_STRIDE)[:, None], mask=mask_lk, other=0.0)
        sum_l = tl.cumsum(decay_l, 0)
        index_l = tl.arange(0, TILE)
        # Transposed, [s, l]: what token l takes of the correction at s.
        is_before = index_l[:, None] < index_l[None, :]
        system_sl = tl.exp(tl.where(is_before, sum_l[None, :] - sum_l[:, None], -float("inf")))
        system_sl = system_sl * strength_l[None, :] * tl.dot(k_lk, tl.trans(k_lk), input_precision=PRECISION)
        identity_ls = tl.where(index_l[:, None] == index_l[None, :], 1.0, 0.0)
        is_near = index_l[:, None] // NEAR == index_l[None, :] // NEAR
        near_sl = tl.where(is_near, system_sl, 0.0)
        inverse_ls = identity_ls
        for i in range(1, NEAR):  # the so-manieth rows of all runs at once: each run has its own columns
            taken_s = tl.sum(tl.where(index_l[None, :] % NEAR == i, near_sl, 0.0), 1)
            known = tl.sum(taken_s[:, None] * inverse_ls, 0)
            inverse_ls -= tl.where((index_l[:, None] % NEAR == i) & is_near, known[None, :], 0.0)
        if TILE > NEAR:  # (near + far)^-1 = (1 + n)^-1 near^-1 with n = near^-1 far, whose fourth power is 0
            far_ls = tl.trans(tl.where(is_near, 0.0, system_sl))
            step_ls = tl.dot(inverse_ls, far_ls, input_precision=PRECISION)
            two_steps_ls = identity_ls + tl.dot(step_ls, step_ls, input_precision=PRECISION)
            inverse_ls = tl.dot(two_steps_ls, inverse_ls, input_precision=PRECISION)
            inverse_ls -= tl.dot(step_ls, inverse_ls, input_precision=PRECISION)
        place_ls = (token_l * (HEADS * TILE))[:, None] + head * TILE + index_l[None, :]
        tl.store(inverse_ptr + place_ls, inverse_ls.to(inverse_ptr.dtype.element_ty), mask=inside_l[:, None])


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=UNALIGNED)
def prompt_delta_kernel(
    x_ptr, strength_ptr, step_ptr, bias_ptr, decay_ptr, state_ptr, out_ptr, inverse_ptr,
    table_ptr, slot_ptr, start_ptr, length_ptr, rows_ptr, table_stride,
    X_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr, VALUE: tl.constexpr, TILE_V: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, NUM_DECODES: tl.constexpr, COUNTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """TILE_V values of one head of one row; tiles begin at multiples of TILE positions."""
    head = tl.program_id(0)
    row, start, begin, length = prompt_row(start_ptr, length_ptr, rows_ptr, tl.program_id(2), NUM_DECODES, COUNTED)
    dim_k = tl.arange(0, KEY_PAD)
    dim_v = tl.program_id(1) * TILE_V + tl.arange(0, TILE_V)
    in_key, in_value = dim_k < KEY, dim_v < VALUE
    table_row, read = prompt_blocks(table_ptr, slot_ptr, row, begin, table_stride, BLOCK)
    place_kv = head * (KEY * VALUE) + dim_k[:, None] * VALUE + dim_v[None, :]
    mask_kv = in_key[:, None] & in_value[None, :]
    state_kv = tl.load(state_ptr + read * STATE_STRIDE + place_kv, mask=mask_kv & (begin > 0), other=0.0)
    query_ptr = x_ptr + head // (HEADS // KEY_HEADS) * KEY + dim_k[None, :]
    value_ptr = x_ptr + 2 * KEY_HEADS * KEY + head * VALUE + dim_v[None, :]
    index_l = tl.arange(0, TILE)
    is_before = index_l[:, None] >= index_l[None, :]
    for tile in range(begin // TILE, tl.cdiv(length, TILE)):
        inside_l, token_l = tile_tokens(tile, start, begin, length, TILE)
        strength_l, decay_l = tile_heads(
            strength_ptr, step_ptr, bias_ptr, decay_ptr, head, token_l, inside_l, HEAD_STRIDE
        )
        mask_lk = inside_l[:, None] & in_key[None, :]
        row_lk = query_ptr + (token_l * X_STRIDE)[:, None]
        q_lk = tl.load(row_lk, mask=mask_lk, other=0.0)
        k_lk = tl.load(row_lk + KEY_HEADS * KEY, mask=mask_lk, other=0.0)
        mask_lv = inside_l[:, None] & in_value[None, :]
        v_lv = tl.load(value_ptr + (token_l * X_STRIDE)[:, None], mask=mask_lv, other=0.0).to(tl.float32)
        inverse_ls = tl.load(
            inverse_ptr + (token_l * (HEADS * TILE))[:, None] + head * TILE + index_l[None, :],
            mask=inside_l[:, None], other=0.0,
        )  # fmt: skip
        sum_l = tl.cumsum(decay_l, 0)
        total = tl.sum(decay_l, 0)
        grown_l1 = tl.exp(sum_l)[:, None]
        rounded_kv = state_kv.to(k_lk.dtype)
        known_lv = tl.dot(k_lk, rounded_kv, input_precision=PRECISION) * grown_l1
        wanted_lv = (v_lv - known_lv) * strength_l[:, None]
        change_lv = tl.dot(inverse_ls, wanted_lv.to(k_lk.dtype), input_precision=PRECISION)
        weight_ls = tl.exp(tl.where(is_before, sum_l[:, None] - sum_l[None, :], -float("inf")))
        weight_ls = weight_ls * tl.dot(q_lk, tl.trans(k_lk), input_precision=PRECISION)
        out_lv = tl.dot(q_lk, rounded_kv, input_precision=PRECISION) * grown_l1
        out_lv = tl.dot(weight_ls.to(k_lk.dtype), change_lv.to(k_lk.dtype), out_lv, input_precision=PRECISION)
        left_lv = (change_lv * tl.exp(total - sum_l)[:, None]).to(k_lk.dtype)
        state_kv = tl.dot(tl.trans(k_lk), left_lv, state_kv * tl.exp(total), input_precision=PRECISION)
        out = out_ptr + (token_l * (HEADS * VALUE))[:, None] + head * VALUE + dim_v[None, :]
        tl.store(out, out_lv.to(out_ptr.dtype.element_ty), mask=mask_lv)
        stop = tl.minimum((tile + 1) * TILE, length)
        if (stop == length) | (stop % BLOCK == 0):
            block = tl.load(table_row + (stop - 1) // BLOCK).to(tl.int64)
            tl.store(state_ptr + block * STATE_STRIDE + place_kv, state_kv, mask=mask_kv)


def gated_delta(
    qkv_tc: Tensor,
    strength_th: Tensor,
    step_th: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    state_bz: Tensor,
    rows: StateRows,
) -> Tensor:
    """As `kernels.reference.gated_delta.gated_delta`; weights are fp32, blocks hold whole tiles, and `strength` and
    `step` are parts of one product. Overwrites `qkv`."""
    assert qkv_tc.stride(1) == step_th.stride(1) == strength_th.stride(1) == state_bz.stride(1) == 1
    assert step_th.stride(0) == strength_th.stride(0)
    out_ti = output(qkv_tc, shape.inner, rows)
    inputs = (qkv_tc, strength_th, step_th, weights.step_bias_h, weights.log_decay_h)
    strides = {"X_STRIDE": qkv_tc.stride(0), "HEAD_STRIDE": step_th.stride(0)}
    of_state = {"STATE_STRIDE": state_bz.stride(0)}
    heads = {
        "KEY_HEADS": shape.num_key_heads,
        "HEADS": shape.num_value_heads,
        "KEY": shape.key_dim,
        "KEY_PAD": max(LEAST, triton.next_power_of_2(shape.key_dim)),
    }
    counted = is_counted(rows)
    if rows.num_decode_rows:
        values = {"VALUE": shape.value_dim, "TILE_V": DECODE_VALUES}
        constants = {**strides, **of_state, **heads, **values, "BLOCK": rows.block_size, "EPS": EPS, "COUNTED": counted}
        grid = (shape.num_value_heads, triton.cdiv(shape.value_dim, DECODE_VALUES), rows.num_decode_rows)
        launch(decode_delta_kernel, grid, (*inputs, state_bz, out_ti, *decode_args(rows)), constants, num_warps=4)
    if rows.num_prompt_rows:
        tile = tile_of(rows.block_size)
        inverse = torch.empty((qkv_tc.shape[0], shape.num_value_heads, tile), dtype=qkv_tc.dtype, device=qkv_tc.device)
        counts = {"NUM_DECODES": 0 if counted else rows.num_decode_rows, "COUNTED": counted}
        which = {"TILE": tile, **counts, "PRECISION": precision(qkv_tc)}
        tiles = triton.cdiv(rows.max_query_len, tile) + 1
        grid = (shape.num_value_heads, tiles, rows.num_prompt_rows)
        args = prompt_args(rows)
        keys = {name: heads[name] for name in ("KEY_HEADS", "KEY", "KEY_PAD")}
        launch(
            unit_kernel,
            (2 * shape.num_key_heads, triton.cdiv(rows.max_query_len, TOKENS), rows.num_prompt_rows),
            (qkv_tc, *args[2:5]),
            {"X_STRIDE": qkv_tc.stride(0), **keys, "TOKENS": TOKENS, "EPS": EPS, **counts},
            num_warps=4,
        )
        launch(invert_kernel, grid, (*inputs, inverse, *args), {**strides, **heads, "NEAR": NEAR, **which}, num_warps=4)
        values = {"VALUE": shape.value_dim, "TILE_V": VALUES, "BLOCK": rows.block_size}
        grid = (shape.num_value_heads, triton.cdiv(shape.value_dim, VALUES), rows.num_prompt_rows)
        constants = {**strides, **of_state, **heads, **values, **which}
        args = (*inputs, state_bz, out_ti, inverse, *args)
        launch(prompt_delta_kernel, grid, args, constants, num_warps=prompt_warps(qkv_tc.device), num_stages=2)
    return out_ti
