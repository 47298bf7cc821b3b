"""Products whose rows do not depend on the other rows: y[m, n] = sum_k x[m, k] W[n, k] + bias[n], any number of rows.

A library's product chooses its kernel, and with it the order of its sums, by the number of rows. Here a sum always runs
over k in the same order, in one accumulator, whatever tile its row is in: no part of k is given to another program.
Tiles differ in rows and columns only. Loads go through the tensor memory accelerator where there is one (TMA).

Shape suffixes: m rows, n output features, k input features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton.handles import only_compiling
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.skinny_linear import SkinnyLinear, store_apart
from octavo.kernels.triton.skinny_table import MAX_ROWS, Ring, bucket_for, choose
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
    (16, Tile(16, 64, 6, 4, True)),
    (32, Tile(32, 64, 6, 4, True)),
    (64, Tile(64, 64, 5, 4, True)),
    (128, Tile(128, 64, 5, 4, False)),
    (1 << 30, Tile(128, 256, 3, 8, False)),
)
"""(rows up to which it holds, tile), of 2-byte numbers."""
SINGLE: Final = Tile(32, 32, 2, 4, False)
"""Of 4-byte numbers, at full precision."""
BLOCK_K: Final = 64
LARGE_N: Final = 1 << 16
"""Matrices of more rows are heads to the ring's table."""
GROUP_M: Final = 8
"""Tiles of rows whose programs run side by side: they share what they read of W."""


@triton.jit
def load_block(matrix, row, k, ROWS: tl.constexpr, num_rows, K: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """ROWS x BLOCK_K of a matrix, zero beyond its borders."""
    if TMA:
        block = matrix.load([row, k])
    else:
        r = row + tl.arange(0, ROWS)
        column = k + tl.arange(0, BLOCK_K)
        inside = (r < num_rows)[:, None] & (column < K)[None, :]
        block = tl.load(matrix + r.to(tl.int64)[:, None] * K + column[None, :], mask=inside, other=0.0)
    return block


@triton.jit(do_not_specialize=["num_rows"])
def invariant_kernel(
    x,
    weight,
    bias_n,
    y_mn,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
    acc = tl.zeros([R, C], tl.float32)
    for k in range(0, K, BLOCK_K):
        x_mk = load_block(x, m0, k, BLOCK_M, num_rows, K, BLOCK_K, TMA)
        w_nk = load_block(weight, n0, k, BLOCK_N, N, K, BLOCK_K, TMA)
        if SWAP_AB:
            acc = tl.dot(w_nk, tl.trans(x_mk), acc, input_precision="ieee")
        else:
            acc = tl.dot(x_mk, tl.trans(w_nk), acc, input_precision="ieee")
    M_AXIS: tl.constexpr = 0 if SWAP_AB else 1
    m = tl.expand_dims(m0 + tl.arange(0, BLOCK_M), M_AXIS)
    n = tl.expand_dims(n0 + tl.arange(0, BLOCK_N), 1 - M_AXIS)
    if HAS_BIAS:
        acc += tl.load(bias_n + n, mask=n < N, other=0.0).to(tl.float32)
    place = m.to(tl.int64) * N + n
    tl.store(y_mn + place, acc.to(y_mn.dtype.element_ty), mask=(m < num_rows) & (n < N))


def choose_tile(num_rows: int, item_bytes: int) -> Tile:
    """By the number of rows, which the results do not show."""
    if item_bytes == 4:
        return SINGLE
    return next(tile for most, tile in TILES if num_rows <= most)


def invariant_launch(x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None, y_mn: Tensor, *, tma: bool) -> Launch:
    """The product as a launch; all tensors are contiguous."""
    num_rows, k = x_mk.shape
    n = weight_nk.shape[0]
    tile = choose_tile(num_rows, x_mk.element_size())

    def operand(matrix: Tensor, rows: int) -> Any:
        return TensorDescriptor(matrix, list(matrix.shape), [k, 1], [rows, BLOCK_K]) if tma else matrix

    args = {
        "x": operand(x_mk, tile.block_m),
        "weight": operand(weight_nk, tile.block_n),
        "bias_n": weight_nk if bias_n is None else bias_n,
        "y_mn": y_mn,
        "num_rows": num_rows,
    }
    constants = {
        "N": n,
        "K": k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": BLOCK_K,
        "GROUP_M": GROUP_M,
        "SWAP_AB": tile.swap,
        "HAS_BIAS": bias_n is not None,
        "TMA": tma,
    }
    programs = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(n, tile.block_n)
    turn_bytes = (tile.block_m + tile.block_n) * BLOCK_K * x_mk.element_size()
    return Launch(invariant_kernel, (programs,), args, constants, tile.warps, stages(tile.stages, turn_bytes))


def ring_config(num_rows: int, n: int, k: int) -> Ring | None:
    """How the ring multiplies so many rows with a matrix [n, k] in bf16, in one accumulator as the kernel here does (a
    device's test compares them bit by bit); None where it can't."""
    if num_rows > MAX_ROWS:
        return None
    config = choose("head" if n > LARGE_N else "qkv", n, k, bucket_for(max(2, num_rows)))
    return config if isinstance(config, Ring) and config.split_k == 1 else None


def product_launch(x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None, y_mn: Tensor) -> Launch:
    """The product as a launch, on CUDA: by the ring on Hopper where it can, which begins to load W sooner."""
    num_rows, k = x_mk.shape
    is_hopper = capability(x_mk.device)[0] == 9 and x_mk.dtype == weight_nk.dtype == torch.bfloat16
    config = ring_config(num_rows, weight_nk.shape[0], k) if is_hopper else None
    if config is None:
        return invariant_launch(x_mk, weight_nk, bias_n, y_mn, tma=has_dependent_launches(x_mk.device))
    linear = SkinnyLinear("qkv", weight_nk, bias_n, {bucket_for(num_rows): config})
    return store_apart(linear, x_mk, y_mn)


def invariant_product(x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [m, n] in `dtype`, on CUDA; k is a multiple of 8."""
    x_mk = x_mk.contiguous()
    y_mn = torch.empty(x_mk.shape[0], weight_nk.shape[0], dtype=dtype, device=x_mk.device)
    pdl = has_dependent_launches(x_mk.device)
    if only_compiling():
        for rows in kinds_of_rows(x_mk.element_size()):
            product_launch(x_mk[:1].expand(rows, -1), weight_nk, bias_n, y_mn[:1].expand(rows, -1)).warm_up(pdl=pdl)
    elif x_mk.shape[0]:
        product_launch(x_mk, weight_nk, bias_n, y_mn).run(pdl=pdl)
    return y_mn


def kinds_of_rows(item_bytes: int) -> list[int]:
    """Numbers of rows, one for every tile (and every bucket of the ring)."""
    return [1] if item_bytes == 4 else [1, *(most + 1 for most, _ in TILES[:-1])]
