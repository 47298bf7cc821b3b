"""The causal convolution of recurrent layers, and the inputs that it reads again in their states.

Rows of one token: one kernel does all of it. Other rows: one kernel convolves all tokens, a second one then leaves the
last inputs at every border of blocks.

Shape suffixes: t tokens of a tile, c channels of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.state_rows import StateRows
from octavo.kernels.triton.handles import launch
from octavo.kernels.triton.state_rows import (
    ROW_ARRAYS,
    decode_args,
    decode_blocks,
    is_counted,
    is_decode,
    output,
    prompt_args,
    prompt_blocks,
    prompt_row,
)

DECODE_CHANNELS, CHANNELS, TOKENS = 256, 128, 16
"""Of a program, over decode rows and over others."""


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=ROW_ARRAYS)
def decode_conv_kernel(
    x_ptr, tap_ptr, bias_ptr, state_ptr, out_ptr, table_ptr, slot_ptr, length_ptr, rows_ptr, table_stride,
    X_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, OFFSET: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """TILE channels of one row: output, and the last inputs moved on by one."""
    row = tl.program_id(1)
    if is_decode(rows_ptr, row, COUNTED):
        channel_c = tl.program_id(0) * TILE + tl.arange(0, TILE)
        inside = channel_c < CHANNELS
        position, read, write = decode_blocks(table_ptr, slot_ptr, length_ptr, row, table_stride, BLOCK)
        x_c = tl.load(x_ptr + row.to(tl.int64) * X_STRIDE + channel_c, mask=inside, other=0.0)
        sum_c = x_c.to(tl.float32) * tl.load(tap_ptr + channel_c * TAPS + TAPS - 1, mask=inside, other=0.0)
        if BIAS:
            sum_c += tl.load(bias_ptr + channel_c, mask=inside, other=0.0).to(tl.float32)
        old_ptr = state_ptr + read * STATE_STRIDE + OFFSET + channel_c
        new_ptr = state_ptr + write * STATE_STRIDE + OFFSET + channel_c
        for k in tl.static_range(TAPS - 1):
            old_c = tl.load(old_ptr + k * CHANNELS, mask=inside & (position > 0), other=0.0)
            sum_c += old_c * tl.load(tap_ptr + channel_c * TAPS + k, mask=inside, other=0.0)
            if k > 0:
                tl.store(new_ptr + (k - 1) * CHANNELS, old_c, mask=inside)
        tl.store(new_ptr + (TAPS - 2) * CHANNELS, x_c.to(tl.float32), mask=inside)
        tl.store(out_ptr + row.to(tl.int64) * CHANNELS + channel_c, silu(sum_c).to(x_c.dtype), mask=inside)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=ROW_ARRAYS)
def prompt_conv_kernel(
    x_ptr, tap_ptr, bias_ptr, state_ptr, out_ptr, table_ptr, slot_ptr, start_ptr, length_ptr, rows_ptr, table_stride,
    X_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, OFFSET: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, BIAS: tl.constexpr,
    NUM_DECODES: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """TILE channels of TOKENS tokens of one row; states are only read."""
    row, start, begin, length = prompt_row(start_ptr, length_ptr, rows_ptr, tl.program_id(2), NUM_DECODES, COUNTED)
    first = tl.program_id(1) * TOKENS
    if first < length - begin:
        channel_c = (tl.program_id(0) * TILE + tl.arange(0, TILE))[None, :]
        index_t = (first + tl.arange(0, TOKENS))[:, None]
        in_channel, in_row = channel_c < CHANNELS, index_t < length - begin
        _, read = prompt_blocks(table_ptr, slot_ptr, row, begin, table_stride, BLOCK)
        tail_ptr = state_ptr + read * STATE_STRIDE + OFFSET + channel_c
        row_ptr = x_ptr + start.to(tl.int64) * X_STRIDE + channel_c
        sum_tc = tl.zeros([TOKENS, TILE], tl.float32)
        if BIAS:
            sum_tc += tl.load(bias_ptr + channel_c, mask=in_channel, other=0.0).to(tl.float32)
        for k in tl.static_range(TAPS):
            source_t = index_t + (k - TAPS + 1)
            is_new = (source_t >= 0) & in_row & in_channel
            is_old = (source_t < 0) & in_row & in_channel & (begin > 0)
            x_tc = tl.load(row_ptr + source_t.to(tl.int64) * X_STRIDE, mask=is_new, other=0.0).to(tl.float32)
            x_tc += tl.load(tail_ptr + (source_t + TAPS - 1) * CHANNELS, mask=is_old, other=0.0)
            sum_tc += x_tc * tl.load(tap_ptr + channel_c * TAPS + k, mask=in_channel, other=0.0).to(tl.float32)
        out_tc = out_ptr + (start + index_t).to(tl.int64) * CHANNELS + channel_c
        tl.store(out_tc, silu(sum_tc).to(out_ptr.dtype.element_ty), mask=in_row & in_channel)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=ROW_ARRAYS)
def prompt_tail_kernel(
    x_ptr, state_ptr, table_ptr, slot_ptr, start_ptr, length_ptr, rows_ptr, table_stride,
    X_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, OFFSET: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, NUM_DECODES: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """TILE channels of one row: the last inputs into the block of every border, and of the row's end. A thread has its
    channels to itself, and reads old inputs before it writes where they are: later blocks come first, oldest inputs
    first."""
    row, start, begin, length = prompt_row(start_ptr, length_ptr, rows_ptr, tl.program_id(1), NUM_DECODES, COUNTED)
    channel_c = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = channel_c < CHANNELS
    table_row, read = prompt_blocks(table_ptr, slot_ptr, row, begin, table_stride, BLOCK)
    row_ptr = x_ptr + start.to(tl.int64) * X_STRIDE + channel_c
    blocks = tl.cdiv(length, BLOCK) - begin // BLOCK
    for piece in range(blocks):
        index = begin // BLOCK + blocks - 1 - piece
        count = tl.minimum((index + 1) * BLOCK, length) - begin
        block = tl.load(table_row + index).to(tl.int64)
        for k in tl.static_range(TAPS - 1):
            source = count + (k - TAPS + 1)
            is_old = inside & (source < 0) & (begin > 0)
            x_c = tl.load(row_ptr + source.to(tl.int64) * X_STRIDE, mask=inside & (source >= 0), other=0.0).to(
                tl.float32
            )
            x_c += tl.load(
                state_ptr + read * STATE_STRIDE + OFFSET + (source + TAPS - 1) * CHANNELS + channel_c,
                mask=is_old, other=0.0,
            )  # fmt: skip
            tl.store(state_ptr + block * STATE_STRIDE + OFFSET + k * CHANNELS + channel_c, x_c, mask=inside)


def causal_conv(
    input_tc: Tensor, tap_ck: Tensor, bias_c: Tensor | None, state_bn: Tensor, rows: StateRows, *, offset: int
) -> Tensor:
    """As `kernels.reference.causal_conv.causal_conv`. A token's channels are dense; blocks are longer than taps."""
    channels, taps = tap_ck.shape
    assert input_tc.stride(1) == 1 == state_bn.stride(1)
    assert tap_ck.is_contiguous()
    assert rows.block_size >= taps
    out_tc = output(input_tc, channels, rows)
    bias = tap_ck if bias_c is None else bias_c
    sizes = {
        "X_STRIDE": input_tc.stride(0),
        "STATE_STRIDE": state_bn.stride(0),
        "OFFSET": offset,
        "CHANNELS": channels,
        "TAPS": taps,
        "BLOCK": rows.block_size,
    }
    counted = is_counted(rows)
    if rows.num_decode_rows:
        grid = (triton.cdiv(channels, DECODE_CHANNELS), rows.num_decode_rows, 1)
        args = (input_tc, tap_ck, bias, state_bn, out_tc, *decode_args(rows))
        constants = {**sizes, "TILE": DECODE_CHANNELS, "BIAS": bias_c is not None, "COUNTED": counted}
        launch(decode_conv_kernel, grid, args, constants, num_warps=4)
    if rows.num_prompt_rows:
        tiles = triton.cdiv(channels, CHANNELS)
        which = {"NUM_DECODES": 0 if counted else rows.num_decode_rows, "COUNTED": counted}
        grid = (tiles, triton.cdiv(rows.max_query_len, TOKENS), rows.num_prompt_rows)
        args = (input_tc, tap_ck, bias, state_bn, out_tc, *prompt_args(rows))
        constants = {**sizes, "TILE": CHANNELS, "TOKENS": TOKENS, "BIAS": bias_c is not None, **which}
        launch(prompt_conv_kernel, grid, args, constants, num_warps=4)
        args = (input_tc, state_bn, *prompt_args(rows))
        launch(
            prompt_tail_kernel,
            (tiles, rows.num_prompt_rows, 1),
            args,
            {**sizes, "TILE": CHANNELS, **which},
            num_warps=4,
        )
    return out_tc
