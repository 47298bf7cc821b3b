"""Products of a few rows (at most 128) with a weight matrix, as launches of gemv.py or ring_gemm.py.

**The residual stream.** A decoder's norm needs no kernel of its own: whoever writes the residual also writes
`gained` = residual * gain of the next norm, and partial sums of squares of every row; whoever reads `gained` multiplies
its output rows by 1 / rms, since (x * gain / rms) W^T = (x * gain) W^T / rms. No atomics, one order of summation.

Epilogues: "store" y (bf16 or fp32); "silu" y = silu(gate) * up, where W stacks gate above up; "residual" residual +=
product, with `gained` and the sums of squares for the next norm.

**fp8.** A matrix in e4m3 has one scale a row, or one for every square (kernels/reference/squares.py). One row of x is
multiplied as it is (its bytes do not count); more rows are quantized first, with a scale for each row, or for every
SIDE features of each, by the launch that `quantized` gives (quantize_rows.py).

Shape suffixes: m rows, n output features, k input features, p partial sums, f flat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.kernels.reference.quantize_rows import FP8
from octavo.kernels.reference.squares import SIDE, num_groups
from octavo.kernels.triton.gemv import gemv
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.quantize_rows import quantize_launch
from octavo.kernels.triton.skinny_table import BUCKETS, MAX_ROWS, Config, Gemv, Ring, bucket_for, choose


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """What travels between blocks, for `MAX_ROWS` rows. One step's producers and consumers take turns on it."""

    residual_mn: Tensor
    gained_mn: Tensor
    squares_f: Tensor
    """fp32: partial p of row m at p * bucket + m."""

    @classmethod
    def allocate(cls, width: int, dtype: torch.dtype, device: torch.device) -> ResidualStream:
        """For rows of `width`: partials of at most one a column of one row, one every 16 columns of MAX_ROWS rows."""
        rows = [torch.zeros(MAX_ROWS, width, dtype=dtype, device=device) for _ in range(2)]
        return cls(*rows, torch.zeros(width * MAX_ROWS // 16, dtype=torch.float32, device=device))


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Where programs that split k meet: partial accumulators, and how many have arrived (0 between launches)."""

    acc_f: Tensor
    count_f: Tensor

    @classmethod
    def allocate(cls, linears: list[SkinnyLinear], device: torch.device) -> SplitScratch:
        """Enough for every bucket of the products."""
        rings = [
            (linear, config)
            for linear in linears
            for config in linear.configs.values()
            if isinstance(config, Ring) and config.split_k > 1
        ]
        floats = max((linear.n * c.block_m * c.split_k for linear, c in rings), default=1)
        tiles = max((linear.n // c.block_n for linear, c in rings), default=1)
        return cls(
            torch.zeros(floats, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """`MAX_ROWS` rows on their way into an fp8 product; one step's products take turns on it."""

    number_f: Tensor
    """e4m3."""
    scale_f: Tensor
    """fp32: of row m at m; or of its group g at g * bucket + m."""

    @classmethod
    def allocate(cls, width: int, device: torch.device) -> QuantizedRows:
        """For rows of at most `width`."""
        numbers = torch.zeros(MAX_ROWS * width, dtype=FP8, device=device)
        return cls(numbers, torch.zeros(MAX_ROWS * num_groups(width), dtype=torch.float32, device=device))

    def numbers(self, num_rows: int, width: int) -> Tensor:
        """The place of such rows [m, k], dense."""
        return self.number_f[: num_rows * width].view(num_rows, width)


@dataclass(frozen=True, slots=True)
class SkinnyLinear:
    """A weight matrix [n, k] (gate_up: [2 n, k]), its bias [rows] or None, and how each bucket multiplies it.

    A matrix in e4m3 comes with the scales of its rows (fp32) and a place for quantized rows of x; or with scales of
    squares (kernels/reference/squares.py), which `share` rows have in common.
    """

    op: str
    weight: Tensor
    bias: Tensor | None
    configs: dict[int, Config]
    scale: Tensor | None = None
    rows: QuantizedRows | None = None
    share: int = 0

    @classmethod
    def make(
        cls,
        op: str,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None = None,
        rows: QuantizedRows | None = None,
        share: int = 0,
    ) -> SkinnyLinear:
        """Look the shape up. The shape must be one that `supports` accepts."""
        n, k = output_features(op, weight.shape[0]), weight.shape[1]
        found = {bucket: choose(op, n, k, bucket, fp8=scale is not None, share=share) for bucket in BUCKETS}
        configs = {bucket: config for bucket, config in found.items() if config is not None}
        return cls(op, weight, bias, configs, scale, rows, share)

    @property
    def n(self) -> int:
        return output_features(self.op, self.weight.shape[0])

    @property
    def k(self) -> int:
        return self.weight.shape[1]

    def num_tiles(self, num_rows: int) -> int:
        """Programs along n, which is the number of partial sums of squares of a "residual" epilogue."""
        return self.n // self.configs[bucket_for(num_rows)].block_n


def output_features(op: str, weight_rows: int) -> int:
    """n of a matrix with so many rows."""
    return weight_rows // 2 if op == "gate_up" else weight_rows


def supports(op: str, n: int, k: int) -> bool:
    """Whether every bucket has a configuration for the shape."""
    return all(choose(op, n, k, bucket) is not None for bucket in BUCKETS)


def quantized(linear: SkinnyLinear, x_mk: Tensor) -> list[Launch]:
    """What must run between the maker of x and the product with it: nothing, or x's quantization."""
    num_rows = x_mk.shape[0]
    if linear.scale is None or isinstance(linear.configs[bucket_for(num_rows)], Gemv):
        return []
    assert linear.rows is not None, "an fp8 matrix comes with a place for quantized rows"
    numbers = linear.rows.numbers(num_rows, linear.k)
    group = SIDE if linear.share else 0
    return [quantize_launch(x_mk, numbers, linear.rows.scale_f, group=group, stride=bucket_for(num_rows))]


def store(linear: SkinnyLinear, x_mk: Tensor, y_mn: Tensor, stream: ResidualStream, partials: int = 0) -> Launch:
    """y = x W^T + bias, in y's dtype. `partials`: x is the stream's `gained`, with so many sums of squares a row."""
    return _launch(linear, x_mk, y_mn, "store", stream, partials, None, None, 0.0)


def store_apart(linear: SkinnyLinear, x_mk: Tensor, y_mn: Tensor) -> Launch:
    """y = x W^T + bias, without any stream."""
    return store(linear, x_mk, y_mn, ResidualStream(y_mn, y_mn, _no_squares(x_mk.device)))


@cache
def _no_squares(device: torch.device) -> Tensor:
    """What stands for the sums of squares that such a product does not read."""
    return torch.zeros(1, dtype=torch.float32, device=device)


def scaled_store(
    linear: SkinnyLinear, stream: ResidualStream, y_mn: Tensor, *, partials: int, epilogue: str, eps: float
) -> Launch:
    """y = epilogue(norm(residual) W^T + bias), epilogue "store" or "silu"; `partials` sums of squares a row."""
    x_mk = stream.gained_mn[: y_mn.shape[0]]
    return _launch(linear, x_mk, y_mn, epilogue, stream, partials, None, None, eps)


def add_residual(
    linear: SkinnyLinear, x_mk: Tensor, stream: ResidualStream, gain_n: Tensor, split: SplitScratch
) -> Launch:
    """residual += x W^T + bias, and the next norm's inputs with its gain."""
    return _launch(linear, x_mk, stream.residual_mn, "residual", stream, 0, gain_n, split, 0.0)


@cache
def _ring_parts() -> tuple[Any, Callable[[Tensor, list[int]], Any]]:
    """The ring kernel and what describes a matrix to it. Gluon's parts of Triton load when they are first needed."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from octavo.kernels.triton.ring_gemm import ring_gemm

    def describe(matrix: Tensor, block: list[int]) -> Any:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * matrix.element_size(), rank=2)
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block, layout)

    return ring_gemm, describe


def _launch(
    linear: SkinnyLinear,
    x_mk: Tensor,
    y_mn: Tensor,
    epilogue: str,
    stream: ResidualStream,
    partials: int,
    gain_n: Tensor | None,
    split: SplitScratch | None,
    eps: float,
) -> Launch:
    num_rows = x_mk.shape[0]
    config = linear.configs[bucket_for(num_rows)]
    squares_f = stream.squares_f
    args: dict[str, Any] = {
        "scale_n": squares_f if linear.scale is None else linear.scale,
        "bias_n": linear.weight if linear.bias is None else linear.bias,
        "gain_n": linear.weight if gain_n is None else gain_n,
        "squares_in": squares_f,
        "squares_out": squares_f,
        "eps": eps,
    }
    constants: dict[str, Any] = {
        "N": linear.n,
        "K": linear.k,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PARTIALS": partials,
        "PARTIALS_P2": triton.next_power_of_2(max(partials, 1)),
        "EPILOGUE": epilogue,
        "HAS_BIAS": linear.bias is not None,
        "FP8": linear.scale is not None,
        "SHARE": linear.share,
        "SIDE": SIDE,
    }
    tiles = linear.n // config.block_n
    if isinstance(config, Gemv):
        rows = {"y_n": y_mn, "residual_n": stream.residual_mn, "gained_n": stream.gained_mn}
        args |= {"x_k": x_mk, "weight_nk": linear.weight, **rows}
        return Launch(gemv, (tiles,), args, constants, config.warps)
    kernel, describe = _ring_parts()
    assert config.split_k == 1 or split is not None, "only the residual epilogue may split k"
    x_scale_m, width = squares_f, SIDE if linear.share else config.block_k
    if linear.rows is not None:
        x_mk, x_scale_m = linear.rows.numbers(num_rows, linear.k), linear.rows.scale_f
    args |= {
        "x_scale_m": x_scale_m,
        "x_desc": describe(x_mk, [config.block_m, width]),
        "weight_desc": describe(linear.weight, [config.block_n, width]),
        "y_mn": y_mn,
        "residual_mn": stream.residual_mn,
        "gained_mn": stream.gained_mn,
        "split_acc": squares_f if split is None else split.acc_f,
        "split_count": squares_f if split is None else split.count_f,
        "num_rows": num_rows,
    }
    constants |= {
        "BLOCK_M": config.block_m,
        "SPLIT_K": config.split_k,
        "STAGES": config.stages,
        "SWAP_AB": config.swap,
        "WARPS": config.warps,
    }
    return Launch(kernel, (tiles, config.split_k), args, constants, config.warps)
