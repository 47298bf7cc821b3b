"""Products of rows in e4m3, with a scale for every 128 features of each, and a matrix in e4m3 that has one for every
square of 128 x 128 numbers (kernels/reference/squares.py): y[m, n] = sum_k x[m, k] W[n, k] + bias[n], any number of
rows, any n and k.

What 128 features give is one product of tensor cores, which is scaled and then added in fp32. Loads go through the
tensor memory accelerator where there is one (TMA), by pointers elsewhere. cuBLAS is faster where it has such products
(layers/quant/fp8_squares.py); one row stays wide and goes to gemv.py, where its blocks fit.

Shape suffixes: m rows, n output features, k input features, g groups of 128 input features, s groups of `share` output
features, which have equal scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from octavo.kernels.triton.skinny_table import Config, choose
from octavo.kernels.triton.target import capability, has_dependent_launches, stages


@dataclass(frozen=True, slots=True)
class Tile:
    """`swap`: W is the left operand, so that rows may be fewer than the tensor core's 64."""

    block_m: int
    block_n: int
    stages: int
    warps: int
    swap: bool


TILES: Final[tuple[tuple[int, Tile], ...]] = (
    (16, Tile(16, 64, 4, 4, True)),
    (32, Tile(32, 64, 6, 4, True)),
    (64, Tile(64, 64, 6, 4, True)),
    (512, Tile(64, 128, 4, 4, False)),
    (1 << 30, Tile(64, 128, 3, 4, False)),
)
"""(rows up to which it holds, tile). Measured on an H200 at 8, 64, 256 and 8192 rows of Llama-3.1-8B's shapes."""
GROUP_M: Final = 8
"""Tiles of rows whose programs run side by side: they share what they read of W."""


@triton.jit(do_not_specialize=["num_rows", "stride"])
def square_kernel(
    x,
    weight,
    x_scale_gm,
    scale_sg,
    bias_n,
    y_mn,
    num_rows,
    stride,  # from one group's scales of x to the next
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # features with one scale
    SHARE: tl.constexpr,  # rows of W with one scale
    GROUP_M: tl.constexpr,
    SWAP_AB: tl.constexpr,
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
        w_nk = load_block(weight, n0, group * BLOCK_K, BLOCK_N, N, K, BLOCK_K, TMA).to(x_mk.dtype)
        if SWAP_AB:
            part = tl.dot(w_nk, tl.trans(x_mk), input_precision="ieee")
        else:
            part = tl.dot(x_mk, tl.trans(w_nk), input_precision="ieee")
        scale_m = tl.load(scales_m + group * stride, mask=row_m < num_rows, other=0.0)
        if IS_SQUARE:
            acc += part * tl.expand_dims(scale_m * tl.load(squares + group), M_AXIS)
        else:
            scale_n = tl.load(squares + group, mask=row_n < N, other=0.0)
            acc += part * tl.expand_dims(scale_n, 1 - M_AXIS) * tl.expand_dims(scale_m, M_AXIS)
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


Rows = tuple[Tensor, Tensor]
"""x in e4m3, dense [m, k], and scales fp32 [g, m], whose rows of m are dense."""


def choose_tile(num_rows: int) -> Tile:
    """By the number of rows."""
    return next(tile for most, tile in TILES if num_rows <= most)


def square_launch(x: Rows, matrix: Squares, bias_n: Tensor | None, y_mn: Tensor, *, tma: bool) -> Launch:
    """The product as a launch, for at least one row."""
    x_mk, x_scale_gm = x
    (num_rows, k), n = x_mk.shape, matrix.number_nk.shape[0]
    tile = choose_tile(num_rows)

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
        "stride": x_scale_gm.stride(0),
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
        "HAS_BIAS": bias_n is not None,
        "TMA": tma,
    }
    programs = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(n, tile.block_n)
    turn_bytes = SIDE * x_mk.element_size() * (tile.block_m + tile.block_n)
    num_stages = stages(tile.stages, turn_bytes, matrix.number_nk.device)
    return Launch(square_kernel, (programs,), args, constants, tile.warps, num_stages)


def square_product(x: Rows, matrix: Squares, bias_n: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [m, n] in `dtype`, on CUDA; k is a multiple of 16."""
    number_mk, n = x[0], matrix.number_nk.shape[0]
    device = number_mk.device
    y_mn = torch.empty(number_mk.shape[0], n, dtype=dtype, device=device)
    pdl, tma = has_dependent_launches(device), capability(device)[0] in (9, 10)
    if only_compiling():
        for rows in rows_of_tiles(matrix):
            y = torch.empty(1, n, dtype=dtype, device=device).expand(rows[0].shape[0], -1)
            square_launch(rows, matrix, bias_n, y, tma=tma).run(pdl=pdl)
    elif number_mk.shape[0]:
        square_launch(x, matrix, bias_n, y_mn, tma=tma).run(pdl=pdl)
    return y_mn


def rows_of_tiles(matrix: Squares) -> Iterator[Rows]:
    """Rows for every tile, without memory of their own."""
    number_1k, scale_g1 = allocate_rows(1, matrix.number_nk.shape[1], matrix.number_nk.device, SIDE)
    for count in (1, *(most + 1 for most, _ in TILES[:-1])):
        yield number_1k.expand(count, -1), scale_g1.expand(-1, count)


def takes_vector(matrix: Squares) -> bool:
    """Whether a block of gemv.py fits the matrix and its squares: one row of x is multiplied as it is then."""
    return _vector_config(matrix) is not None


def _vector_config(matrix: Squares) -> Config | None:
    n, k = matrix.number_nk.shape
    return choose("qkv", n, k, 1, fp8=True, share=matrix.share)


def vector_launch(x_1k: Tensor, matrix: Squares, bias_n: Tensor | None, y_1n: Tensor) -> Launch:
    """The product of one wide row, dense, with a matrix that takes it."""
    config = _vector_config(matrix)
    assert config is not None, "see takes_vector"
    linear = SkinnyLinear("qkv", matrix.number_nk, bias_n, {1: config}, matrix.scale_sg, None, matrix.share)
    return store_apart(linear, x_1k, y_1n)


def vector_product(x_1k: Tensor, matrix: Squares, bias_n: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [1, n] in `dtype`, of one wide row and a matrix that takes it."""
    y_1n = torch.empty(1, matrix.number_nk.shape[0], dtype=dtype, device=x_1k.device)
    vector_launch(x_1k.contiguous(), matrix, bias_n, y_1n).run(pdl=has_dependent_launches(x_1k.device))
    return y_1n
