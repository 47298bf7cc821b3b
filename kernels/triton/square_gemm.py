"""Products with a matrix in e4m3 that has a scale for every square of 128 x 128 numbers (kernels/reference/squares.py):
y[m, n] = sum_k x[m, k] W[n, k] + bias[n], any number of rows, any n and k.

What 128 features give is one product of tensor cores, which is scaled and then added in fp32. Few rows are bound by
reading W: they stay as they are, and W is widened to their type in registers, which is exact. More rows are e4m3 too,
with a scale for every 128 features of each. Loads go through the tensor memory accelerator where there is one (TMA), by
pointers elsewhere. One row: gemv.py, where its blocks fit.

Shape suffixes: m rows, n output features, k input features, g groups of 128 input features, s groups of `share` output
features, which have equal scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.reference.squares import SIDE
from octavo.kernels.triton.handles import only_compiling
from octavo.kernels.triton.invariant_gemm import load_block
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.quantize_rows import allocate_rows
from octavo.kernels.triton.skinny_linear import SkinnyLinear, store_apart
from octavo.kernels.triton.skinny_table import choose
from octavo.kernels.triton.target import capability, has_dependent_launches

FEW_ROWS: Final = 64
"""Up to so many rows stay wide."""


@dataclass(frozen=True, slots=True)
class Tile:
    """`swap`: W is the left operand, so that rows may be fewer than the tensor core's 64."""

    block_m: int
    block_n: int
    stages: int
    warps: int
    swap: bool


WIDE: Final[tuple[tuple[int, Tile], ...]] = (
    (16, Tile(16, 64, 6, 4, True)),
    (32, Tile(32, 64, 5, 4, True)),
    (FEW_ROWS, Tile(64, 64, 4, 4, True)),
)
EIGHT: Final[tuple[tuple[int, Tile], ...]] = (
    (512, Tile(128, 64, 4, 8, False)),
    (1 << 30, Tile(128, 128, 5, 8, False)),
)
"""(rows up to which it holds, tile), of rows in 2 bytes and in e4m3. From compile-time study (registers, spills, shared
memory); none is measured."""
SINGLE: Final = Tile(32, 32, 2, 4, False)
"""Of rows in 4 bytes, at full precision."""
LEAST_PROGRAMS: Final = 100
"""With fewer, many multiprocessors would have nothing to read: tiles are narrower then."""
NARROW: Final = 32
SHARED_BYTES: Final = {True: 227 << 10, False: 97 << 10}
"""For pipelines, by whether there is a tensor memory accelerator: of Hopper and of the data centers' Blackwell, and of
other devices that multiply e4m3."""
GROUP_M: Final = 8
"""Tiles of rows whose programs run side by side: they share what they read of W."""


@triton.jit(do_not_specialize=["num_rows"])
def square_kernel(
    x,
    weight,
    x_scale_gm,
    scale_sg,
    bias_n,
    y_mn,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # features with one scale
    SHARE: tl.constexpr,  # rows of W with one scale
    GROUP_M: tl.constexpr,
    SWAP_AB: tl.constexpr,
    EIGHT: tl.constexpr,  # rows in e4m3; else wide
    HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    in_group = GROUP_M * tiles_n
    first_m = tile // in_group * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    m0 = (first_m + tile % in_group % height) * BLOCK_M
    n0 = tile % in_group // height * BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    R: tl.constexpr = BLOCK_N if SWAP_AB else BLOCK_M
    C: tl.constexpr = BLOCK_M if SWAP_AB else BLOCK_N
    M_AXIS: tl.constexpr = 0 if SWAP_AB else 1
    GROUPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    IS_SQUARE: tl.constexpr = SHARE % BLOCK_N == 0  # one scale for all of the tile's rows of W
    row_m = m0 + tl.arange(0, BLOCK_M)
    row_n = n0 + tl.arange(0, BLOCK_N)
    squares = scale_sg + (n0 if IS_SQUARE else row_n) // SHARE * GROUPS
    scales_m = x_scale_gm + row_m
    acc = tl.zeros([R, C], tl.float32)
    for group in range(GROUPS):
        x_mk = load_block(x, m0, group * BLOCK_K, BLOCK_M, num_rows, K, BLOCK_K, TMA)
        w_nk = load_block(weight, n0, group * BLOCK_K, BLOCK_N, N, K, BLOCK_K, TMA)
        if not (EIGHT or TMA):
            w_nk = w_nk.to(tl.float32)  # before Hopper, Triton 3.6 can't widen e4m3 to bf16 at once
        w_nk = w_nk.to(x_mk.dtype)
        if SWAP_AB:
            part = tl.dot(w_nk, tl.trans(x_mk), input_precision="ieee")
        else:
            part = tl.dot(x_mk, tl.trans(w_nk), input_precision="ieee")
        if EIGHT:
            scale_m = tl.load(scales_m, mask=row_m < num_rows, other=0.0)
            scales_m += num_rows
        if IS_SQUARE:
            scale = tl.load(squares + group)
            if EIGHT:
                acc += part * tl.expand_dims(scale_m * scale, M_AXIS)
            else:
                acc += part * scale
        else:
            scale_n = tl.load(squares + group, mask=row_n < N, other=0.0)
            part = part * tl.expand_dims(scale_n, 1 - M_AXIS)
            acc += part * tl.expand_dims(scale_m, M_AXIS) if EIGHT else part
    m = tl.expand_dims(row_m, M_AXIS)
    n = tl.expand_dims(row_n, 1 - M_AXIS)
    if HAS_BIAS:
        acc += tl.load(bias_n + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_mn + m.to(tl.int64) * N + n, acc.to(y_mn.dtype.element_ty), mask=(m < num_rows) & (n < N))


@dataclass(frozen=True, slots=True)
class Squares:
    """A matrix [n, k] in e4m3 and its scales, fp32 [n / share, g] rounded up; all dense."""

    number_nk: Tensor
    scale_sg: Tensor
    share: int = SIDE


Rows = Tensor | tuple[Tensor, Tensor]
"""x [m, k], wide; or in e4m3 with scales fp32 [g, m]. Dense."""


def choose_tile(num_rows: int, n: int, item_bytes: int) -> Tile:
    """By the shape, and the bytes of a number of x."""
    if item_bytes == 4:
        return SINGLE
    table = EIGHT if item_bytes == 1 else WIDE
    tile = next((tile for most, tile in table if num_rows <= most), table[-1][1])
    programs = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(n, tile.block_n)
    return replace(tile, block_n=NARROW) if programs < LEAST_PROGRAMS and tile.swap else tile


def square_launch(x: Rows, matrix: Squares, bias_n: Tensor | None, y_mn: Tensor, *, tma: bool) -> Launch:
    """The product as a launch, for at least one row."""
    x_mk, x_scale_gm = (x, matrix.scale_sg) if isinstance(x, Tensor) else x
    (num_rows, k), n = x_mk.shape, matrix.number_nk.shape[0]
    tile = choose_tile(num_rows, n, x_mk.element_size())

    def operand(values: Tensor, rows: int) -> Any:
        return TensorDescriptor(values, list(values.shape), [k, 1], [rows, SIDE]) if tma else values

    args = {
        "x": operand(x_mk, tile.block_m),
        "weight": operand(matrix.number_nk, tile.block_n),
        "x_scale_gm": x_scale_gm,
        "scale_sg": matrix.scale_sg,
        "bias_n": matrix.scale_sg if bias_n is None else bias_n,
        "y_mn": y_mn,
        "num_rows": num_rows,
    }
    constants = {
        "N": n,
        "K": k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": SIDE,
        "SHARE": matrix.share,
        "GROUP_M": GROUP_M,
        "SWAP_AB": tile.swap,
        "EIGHT": not isinstance(x, Tensor),
        "HAS_BIAS": bias_n is not None,
        "TMA": tma,
    }
    programs = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(n, tile.block_n)
    turn_bytes = SIDE * (tile.block_m * x_mk.element_size() + tile.block_n)
    stages = min(tile.stages, SHARED_BYTES[tma] // turn_bytes)
    return Launch(square_kernel, (programs,), args, constants, tile.warps, stages)


def vector_launch(x_1k: Tensor, matrix: Squares, bias_n: Tensor | None, y_1n: Tensor) -> Launch | None:
    """The product of one wide row; None where no block of gemv.py fits the matrix and its squares."""
    n, k = matrix.number_nk.shape
    config = choose("qkv", n, k, 1, fp8=True, share=matrix.share)
    if config is None:
        return None
    linear = SkinnyLinear("qkv", matrix.number_nk, bias_n, {1: config}, matrix.scale_sg, None, matrix.share)
    return store_apart(linear, x_1k, y_1n)


def product_launch(x: Rows, matrix: Squares, bias_n: Tensor | None, y_mn: Tensor, *, tma: bool) -> Launch:
    """The product as a launch, for at least one row."""
    is_vector = isinstance(x, Tensor) and x.shape[0] == 1
    vector = vector_launch(x, matrix, bias_n, y_mn) if is_vector else None
    return vector or square_launch(x, matrix, bias_n, y_mn, tma=tma)


def square_product(x: Rows, matrix: Squares, bias_n: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [m, n] in `dtype`, on CUDA; k is a multiple of 16."""
    x = x.contiguous() if isinstance(x, Tensor) else x
    x_mk = x if isinstance(x, Tensor) else x[0]
    y_mn = torch.empty(x_mk.shape[0], matrix.number_nk.shape[0], dtype=dtype, device=x_mk.device)
    pdl, tma = has_dependent_launches(x_mk.device), capability(x_mk.device)[0] in (9, 10)
    if only_compiling():
        for some in kinds_of_rows(matrix, dtype):
            rows = (some if isinstance(some, Tensor) else some[0]).shape[0]
            y = torch.empty(1, y_mn.shape[1], dtype=dtype, device=y_mn.device).expand(rows, -1)
            product_launch(some, matrix, bias_n, y, tma=tma).run(pdl=pdl)
    elif x_mk.shape[0]:
        product_launch(x, matrix, bias_n, y_mn, tma=tma).run(pdl=pdl)
    return y_mn


def kinds_of_rows(matrix: Squares, dtype: torch.dtype) -> Iterator[Rows]:
    """Rows for every tile, wide ones in `dtype`."""
    device, k = matrix.number_nk.device, matrix.number_nk.shape[1]
    for count in (1, 2, *(most + 1 for most, _ in WIDE[:-1])):
        yield torch.empty(1, k, dtype=dtype, device=device).expand(count, -1)
    number_1k, scale_g1 = allocate_rows(1, k, device, SIDE)
    for count in (FEW_ROWS + 1, *(most + 1 for most, _ in EIGHT[:-1])):
        yield number_1k.expand(count, -1), scale_g1.expand(-1, count)
