"""Device functions that the kernels of recurrent layers share: where a row's tokens and states are; and what their
launches have in common. See `kernels.reference.state_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference.state_rows import StateRows
from octavo.kernels.triton.target import is_small

TILES = (64, 32, 16)
"""Tokens of a tile; a block has whole tiles of the largest that fits."""
ROW_ARRAYS = ["slot_ptr", "start_ptr", "length_ptr", "rows_ptr"]
"""Slices of an arena."""


@triton.jit
def is_decode(rows_ptr, row, COUNTED: tl.constexpr):
    """Whether a program's row is one; launches are for more where only the device knows how many there are."""
    found = row >= 0
    if COUNTED:
        found = row < tl.load(rows_ptr)
    return found


@triton.jit
def decode_blocks(table_ptr, slot_ptr, length_ptr, row, table_stride, BLOCK: tl.constexpr):
    """(position of the row's token, block of the state before it, of the state after it)."""
    position = tl.load(length_ptr + row) - 1
    table_row = table_ptr + tl.load(slot_ptr + row).to(tl.int64) * table_stride
    read = tl.load(table_row + tl.maximum(position - 1, 0) // BLOCK).to(tl.int64)
    return position, read, tl.load(table_row + position // BLOCK).to(tl.int64)


@triton.jit
def prompt_row(start_ptr, length_ptr, rows_ptr, prompt, NUM_DECODES: tl.constexpr, COUNTED: tl.constexpr):
    """(row, its first token, its first position, the position after its last) of the so-manieth row that does not
    decode; a row without tokens has no positions."""
    row = prompt + NUM_DECODES
    if COUNTED:
        row = prompt + tl.load(rows_ptr)
    start = tl.load(start_ptr + row)
    end = tl.load(start_ptr + row + 1)
    length = tl.where(start < end, tl.load(length_ptr + row), 0)
    return row, start, length - (end - start), length


@triton.jit
def prompt_blocks(table_ptr, slot_ptr, row, begin, table_stride, BLOCK: tl.constexpr):
    """(where the row's table begins, block of the state before position `begin`)."""
    table_row = table_ptr + tl.load(slot_ptr + row).to(tl.int64) * table_stride
    return table_row, tl.load(table_row + tl.maximum(begin - 1, 0) // BLOCK).to(tl.int64)


@triton.jit
def softplus(x):
    """log(1 + e^x), which is x where that is large."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


def tile_of(block_size: int) -> int:
    """Tokens of a tile. ValueError: no tile divides a block."""
    for tile in TILES:
        if block_size % tile == 0:
            return tile
    raise ValueError(f"blocks of {block_size} tokens: the kernels of recurrent layers need a multiple of {TILES[-1]}")


def decode_args(rows: StateRows) -> tuple[Tensor | int, ...]:
    """Run-time arguments of a kernel over decode rows: table, slot, length, rows, table_stride."""
    count = rows.kv_len_r if rows.num_decode_rows_1 is None else rows.num_decode_rows_1
    return rows.block_table_sb, rows.row_slot_r, rows.kv_len_r, count, rows.block_table_sb.stride(0)


def prompt_args(rows: StateRows) -> tuple[Tensor | int, ...]:
    """Of one over the other rows: table, slot, start, length, rows, table_stride."""
    table_sb, slot_r, length_r, count, stride = decode_args(rows)
    return table_sb, slot_r, rows.query_start_r, length_r, count, stride


def is_counted(rows: StateRows) -> bool:
    """Only the device knows how many rows decode."""
    return rows.num_decode_rows_1 is not None


def output(like_tc: Tensor, width: int, rows: StateRows) -> Tensor:
    """[t, width]; zeros if there may be tokens of no row."""
    make = torch.zeros if is_counted(rows) else torch.empty
    return make((like_tc.shape[0], width), dtype=like_tc.dtype, device=like_tc.device)


def precision(like: Tensor) -> str:
    """Of products."""
    return "ieee" if like.dtype == torch.float32 else "tf32"


def prompt_warps(device: torch.device) -> int:
    """Of a program that walks a prompt with a state in registers: 4 warps' do not hold it beside tiles where tensor
    cores read registers, too."""
    return 8 if is_small(device) else 4
