"""The state-space layer of Mamba 2 (Dao and Gu, 2024). Rows of one token: a program a head and row brings the state on
by one. Other rows: a program a head walks the row's tiles with the state in registers; within a tile the quadratic
form (section 6) does with products what the recurrence does token by token.

Shape suffixes: l tokens of a tile (s: those before), p head dim (padded), n state dim (padded).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.state_rows import StateRows
from octavo.kernels.reference.state_space import StateSpaceShape, StateSpaceWeights
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
WIDE = 128
"""Numbers of a row of a state beyond which more warps share it."""
TILE_NUMBERS = 4096
"""Of the part of a state that a program over a prompt holds."""


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=[*ROW_ARRAYS, "step_ptr"])
def decode_space_kernel(
    x_ptr, step_ptr, bias_ptr, decay_ptr, skip_ptr, state_ptr, out_ptr,
    table_ptr, slot_ptr, length_ptr, rows_ptr, table_stride, low, high,
    X_STRIDE: tl.constexpr, STEP_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, STATE: tl.constexpr, STATE_PAD: tl.constexpr,
    BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One head of one row."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    if is_decode(rows_ptr, row, COUNTED):
        position, read, write = decode_blocks(table_ptr, slot_ptr, length_ptr, row, table_stride, BLOCK)
        dim_p = tl.arange(0, DIM_PAD)
        dim_n = tl.arange(0, STATE_PAD)
        in_dim, in_state = dim_p < DIM, dim_n < STATE
        row_ptr = x_ptr + row.to(tl.int64) * X_STRIDE
        group_ptr = row_ptr + HEADS * DIM + head // (HEADS // GROUPS) * STATE + dim_n
        x_p = tl.load(row_ptr + head * DIM + dim_p, mask=in_dim, other=0.0).to(tl.float32)
        b_n = tl.load(group_ptr, mask=in_state, other=0.0).to(tl.float32)
        c_n = tl.load(group_ptr + GROUPS * STATE, mask=in_state, other=0.0).to(tl.float32)
        step = tl.load(step_ptr + row.to(tl.int64) * STEP_STRIDE + head).to(tl.float32) + tl.load(bias_ptr + head)
        step = tl.minimum(tl.maximum(softplus(step), low), high)
        decay = tl.exp(-step * tl.exp(tl.load(decay_ptr + head)))
        place_pn = head * (DIM * STATE) + dim_p[:, None] * STATE + dim_n[None, :]
        mask_pn = in_dim[:, None] & in_state[None, :]
        state_pn = tl.load(state_ptr + read * STATE_STRIDE + place_pn, mask=mask_pn & (position > 0), other=0.0)
        state_pn = state_pn * decay + (step * x_p)[:, None] * b_n[None, :]
        tl.store(state_ptr + write * STATE_STRIDE + place_pn, state_pn, mask=mask_pn)
        out_p = tl.sum(state_pn * c_n[None, :], 1) + tl.load(skip_ptr + head) * x_p
        out = out_ptr + row.to(tl.int64) * (HEADS * DIM) + head * DIM + dim_p
        tl.store(out, out_p.to(out_ptr.dtype.element_ty), mask=in_dim)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=[*ROW_ARRAYS, "step_ptr"])
def prompt_space_kernel(
    x_ptr, step_ptr, bias_ptr, decay_ptr, skip_ptr, state_ptr, out_ptr,
    table_ptr, slot_ptr, start_ptr, length_ptr, rows_ptr, table_stride, low, high,
    X_STRIDE: tl.constexpr, STEP_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, DIM: tl.constexpr, TILE_P: tl.constexpr, STATE: tl.constexpr, STATE_PAD: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, NUM_DECODES: tl.constexpr, COUNTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """TILE_P dims of one head of one row; tiles begin at multiples of TILE positions: borders of blocks are theirs."""
    head = tl.program_id(0)
    row, start, begin, length = prompt_row(start_ptr, length_ptr, rows_ptr, tl.program_id(1), NUM_DECODES, COUNTED)
    dim_p = tl.program_id(2) * TILE_P + tl.arange(0, TILE_P)
    dim_n = tl.arange(0, STATE_PAD)
    in_dim, in_state = dim_p < DIM, dim_n < STATE
    table_row, read = prompt_blocks(table_ptr, slot_ptr, row, begin, table_stride, BLOCK)
    place_np = head * (DIM * STATE) + dim_p[None, :] * STATE + dim_n[:, None]
    mask_np = in_dim[None, :] & in_state[:, None]
    state_np = tl.load(state_ptr + read * STATE_STRIDE + place_np, mask=mask_np & (begin > 0), other=0.0)
    bias, rate, skip = tl.load(bias_ptr + head), tl.exp(tl.load(decay_ptr + head)), tl.load(skip_ptr + head)
    group = HEADS * DIM + head // (HEADS // GROUPS) * STATE
    for tile in range(begin // TILE, tl.cdiv(length, TILE)):
        position_l = tile * TILE + tl.arange(0, TILE)
        inside_l = (position_l >= begin) & (position_l < length)
        token_l = (start + position_l - begin).to(tl.int64)
        row_l = x_ptr + token_l * X_STRIDE
        mask_ln = inside_l[:, None] & in_state[None, :]
        x_lp = tl.load(
            row_l[:, None] + head * DIM + dim_p[None, :], mask=inside_l[:, None] & in_dim[None, :], other=0.0
        ).to(tl.float32)
        b_ln = tl.load(row_l[:, None] + group + dim_n[None, :], mask=mask_ln, other=0.0)
        c_ln = tl.load(row_l[:, None] + group + GROUPS * STATE + dim_n[None, :], mask=mask_ln, other=0.0)
        dtype = b_ln.dtype
        step_l = tl.load(step_ptr + token_l * STEP_STRIDE + head, mask=inside_l, other=0.0).to(tl.float32) + bias
        step_l = tl.minimum(tl.maximum(softplus(step_l), low), high)
        step_l = tl.where(inside_l, step_l, 0.0)
        decay_l = -step_l * rate
        sum_l = tl.cumsum(decay_l, 0)
        total = tl.sum(decay_l, 0)
        is_before = position_l[:, None] >= position_l[None, :]
        weight_ls = tl.exp(tl.where(is_before, sum_l[:, None] - sum_l[None, :], -float("inf")))
        weight_ls = weight_ls * tl.dot(c_ln, tl.trans(b_ln), input_precision=PRECISION)
        gain_lp = x_lp * step_l[:, None]
        out_lp = tl.dot(c_ln, state_np.to(dtype), input_precision=PRECISION) * tl.exp(sum_l)[:, None]
        out_lp = tl.dot(weight_ls.to(dtype), gain_lp.to(dtype), out_lp, input_precision=PRECISION) + skip * x_lp
        left_lp = gain_lp * tl.exp(total - sum_l)[:, None]
        state_np = tl.dot(tl.trans(b_ln), left_lp.to(dtype), state_np * tl.exp(total), input_precision=PRECISION)
        out = out_ptr + token_l[:, None] * (HEADS * DIM) + head * DIM + dim_p[None, :]
        tl.store(out, out_lp.to(out_ptr.dtype.element_ty), mask=inside_l[:, None] & in_dim[None, :])
        stop = tl.minimum((tile + 1) * TILE, length)
        if (stop == length) | (stop % BLOCK == 0):
            block = tl.load(table_row + (stop - 1) // BLOCK).to(tl.int64)
            tl.store(state_ptr + block * STATE_STRIDE + place_np, state_np, mask=mask_np)


def state_space(
    xbc_tc: Tensor,
    step_th: Tensor,
    weights: StateSpaceWeights,
    shape: StateSpaceShape,
    state_bz: Tensor,
    rows: StateRows,
) -> Tensor:
    """As `kernels.reference.state_space.state_space`; weights are fp32, blocks hold whole tiles."""
    assert xbc_tc.stride(1) == step_th.stride(1) == state_bz.stride(1) == 1
    out_ti = output(xbc_tc, shape.inner, rows)
    low, high = (float(limit) for limit in weights.step_limits)
    parameters = weights.step_bias_h, weights.log_decay_h, weights.skip_h
    before = (xbc_tc, step_th, *parameters, state_bz, out_ti)
    sizes = {
        "X_STRIDE": xbc_tc.stride(0),
        "STEP_STRIDE": step_th.stride(0),
        "STATE_STRIDE": state_bz.stride(0),
        "HEADS": shape.num_heads,
        "GROUPS": shape.num_groups,
        "DIM": shape.head_dim,
    }
    dim_pad = max(LEAST, triton.next_power_of_2(shape.head_dim))
    state = {"STATE": shape.state_dim, "STATE_PAD": max(LEAST, triton.next_power_of_2(shape.state_dim))}
    block = {"BLOCK": rows.block_size}
    counted = is_counted(rows)
    if rows.num_decode_rows:
        grid = (shape.num_heads, rows.num_decode_rows, 1)
        args = (*before, *decode_args(rows), low, high)
        constants = {**sizes, "DIM_PAD": dim_pad, **state, **block, "COUNTED": counted}
        launch(decode_space_kernel, grid, args, constants, num_warps=8 if state["STATE_PAD"] > WIDE else 4)
    if rows.num_prompt_rows:
        tile_p = max(LEAST, min(dim_pad, TILE_NUMBERS // state["STATE_PAD"]))
        constants = {
            **sizes,
            "TILE_P": tile_p,
            **state,
            **block,
            "TILE": tile_of(rows.block_size),
            "NUM_DECODES": 0 if counted else rows.num_decode_rows,
            "COUNTED": counted,
            "PRECISION": precision(xbc_tc),
        }
        grid = (shape.num_heads, rows.num_prompt_rows, triton.cdiv(shape.head_dim, tile_p))
        args = (*before, *prompt_args(rows), low, high)
        launch(prompt_space_kernel, grid, args, constants, num_warps=prompt_warps(xbc_tc.device), num_stages=2)
    return out_ti
