"""Products of a few rows (at most 128) with a weight matrix, as launches of gemv.py or ring_gemm.py.

**The residual stream.** A decoder's norm needs no kernel of its own: whoever writes the residual also writes
`gained` = residual * gain of the next norm, and partial sums of squares of every row; whoever reads `gained` multiplies
its output rows by 1 / rms, since (x * gain / rms) W^T = (x * gain) W^T / rms. No atomics, one order of summation.

Epilogues: "store" y (bf16 or fp32); "silu" y = silu(gate) * up, where W stacks gate above up; "residual" residual +=
product, with `gained` and the sums of squares for the next norm.

**fp8.** A matrix in e4m3 has one scale a row. One row of x is multiplied as it is (its bytes do not count); more rows
are e4m3 too, with a scale for every GROUP features. Products whose programs make GROUP features of a row leave them so
for the next one (`add_for`, `gated`); what comes from elsewhere is quantized by a launch of its own (`quantized`).

Shape suffixes: m rows, n output features, k input features, p partial sums, g groups, f flat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.kernels.reference.quantize_rows import FP8, GROUP
from octavo.kernels.triton.gemv import gemv
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.quantize_rows import groups_launch
from octavo.kernels.triton.skinny_table import BUCKETS, MAX_ROWS, Config, Gemv, Ring, bucket_for, choose


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """`MAX_ROWS` rows on their way into an fp8 product."""

    number_f: Tensor
    """e4m3."""
    scale_f: Tensor
    """fp32: group g of row m at g * bucket + m."""

    @classmethod
    def allocate(cls, width: int, device: torch.device) -> QuantizedRows:
        """For rows of at most `width`."""
        numbers = torch.zeros(MAX_ROWS * width, dtype=FP8, device=device)
        return cls(numbers, torch.zeros(MAX_ROWS * width // GROUP, dtype=torch.float32, device=device))

    def numbers(self, num_rows: int, width: int) -> Tensor:
        """The place of such rows [m, k], dense."""
        return self.number_f[: num_rows * width].view(num_rows, width)


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """What travels between blocks, for `MAX_ROWS` rows. One step's producers and consumers take turns on it."""

    residual_mn: Tensor
    gained_mn: Tensor
    squares_f: Tensor
    """fp32: partial p of row m at p * bucket + m."""
    quantized: QuantizedRows | None = None
    """`gained` in e4m3, for fp8 products; one of the two is up to date."""

    @classmethod
    def allocate(cls, width: int, dtype: torch.dtype, device: torch.device, *, has_fp8: bool = False) -> ResidualStream:
        """For rows of `width`: partials of at most one a column of one row, one every 16 columns of MAX_ROWS rows."""
        rows = [torch.zeros(MAX_ROWS, width, dtype=dtype, device=device) for _ in range(2)]
        squares_f = torch.zeros(width * MAX_ROWS // 16, dtype=torch.float32, device=device)
        return cls(*rows, squares_f, QuantizedRows.allocate(width, device) if has_fp8 else None)

    def gained_for(self, num_rows: int, quantize: bool) -> tuple[Tensor, Tensor]:
        """Where `gained` goes, and its scales (of e4m3; else of no use)."""
        if not quantize:
            return self.gained_mn, self.squares_f
        assert self.quantized is not None, "a stream beside fp8 products has room for their rows"
        return self.quantized.numbers(num_rows, self.gained_mn.shape[1]), self.quantized.scale_f


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
class SkinnyLinear:
    """A weight matrix [n, k] (gate_up: [2 n, k]), its bias [rows] or None, and how each bucket multiplies it.

    A matrix in e4m3 comes with the scales of its rows (fp32).
    """

    op: str
    weight: Tensor
    bias: Tensor | None
    configs: dict[int, Config]
    scale: Tensor | None = None

    @classmethod
    def make(cls, op: str, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> SkinnyLinear:
        """Look the shape up. The shape must be one that `supports` accepts."""
        n, k = output_features(op, weight.shape[0]), weight.shape[1]
        found = {bucket: choose(op, n, k, bucket, fp8=scale is not None) for bucket in BUCKETS}
        configs = {bucket: config for bucket, config in found.items() if config is not None}
        return cls(op, weight, bias, configs, scale)

    @property
    def n(self) -> int:
        return output_features(self.op, self.weight.shape[0])

    @property
    def k(self) -> int:
        return self.weight.shape[1]

    def num_tiles(self, num_rows: int) -> int:
        """Programs along n, which is the number of partial sums of squares of a "residual" epilogue."""
        return self.n // self.configs[bucket_for(num_rows)].block_n

    def reads_eight(self, num_rows: int) -> bool:
        """Whether so many rows of x must be in e4m3."""
        return self.scale is not None and not isinstance(self.configs[bucket_for(num_rows)], Gemv)

    def makes_groups(self, num_rows: int) -> bool:
        """Whether a program makes GROUP features of each row."""
        config = self.configs[bucket_for(num_rows)]
        return isinstance(config, Ring) and config.block_n == GROUP


def output_features(op: str, weight_rows: int) -> int:
    """n of a matrix with so many rows."""
    return weight_rows // 2 if op == "gate_up" else weight_rows


def supports(op: str, n: int, k: int) -> bool:
    """Whether every bucket has a configuration for the shape."""
    return all(choose(op, n, k, bucket) is not None for bucket in BUCKETS)


def quantized(x_mk: Tensor, rows: QuantizedRows) -> Launch:
    """Rows into e4m3, for what comes from a kernel that leaves them wide."""
    num_rows, width = x_mk.shape
    return groups_launch(x_mk, rows.numbers(num_rows, width), rows.scale_f, bucket_for(num_rows))


def store(linear: SkinnyLinear, x_mk: Tensor, y_mn: Tensor, stream: ResidualStream, partials: int = 0) -> Launch:
    """y = x W^T + bias, in y's dtype. `partials`: x is the stream's `gained`, with so many sums of squares a row."""
    return _launch(linear, x_mk, y_mn, "store", stream, partials=partials)


def scaled_store(
    linear: SkinnyLinear,
    stream: ResidualStream,
    y_mn: Tensor,
    *,
    partials: int,
    epilogue: str,
    eps: float,
    y_rows: QuantizedRows | None = None,
) -> Launch:
    """y = epilogue(norm(residual) W^T + bias), epilogue "store" or "silu"; `partials` sums of squares a row. With
    `y_rows` y goes there, in e4m3."""
    num_rows, width = y_mn.shape
    x_mk = stream.gained_mn[:num_rows]
    if y_rows is not None:
        y_mn = y_rows.numbers(num_rows, width)
    rows = stream.quantized
    return _launch(linear, x_mk, y_mn, epilogue, stream, partials=partials, eps=eps, x_rows=rows, y_rows=y_rows)


def gated(
    linear: SkinnyLinear,
    stream: ResidualStream,
    y_mn: Tensor,
    y_rows: QuantizedRows | None,
    *,
    partials: int,
    eps: float,
) -> list[Launch]:
    """y = silu(gate) * up of norm(residual), into `y_rows` if they are there."""
    makes = linear.makes_groups(y_mn.shape[0])
    inside = y_rows if makes else None
    product = scaled_store(linear, stream, y_mn, partials=partials, epilogue="silu", eps=eps, y_rows=inside)
    return [product] if makes or y_rows is None else [product, quantized(y_mn, y_rows)]


def add_residual(
    linear: SkinnyLinear,
    x_mk: Tensor,
    stream: ResidualStream,
    gain_n: Tensor,
    split: SplitScratch,
    *,
    x_rows: QuantizedRows | None = None,
    quantize: bool = False,
) -> Launch:
    """residual += x W^T + bias, and the next norm's inputs with its gain, in e4m3 if `quantize`. An fp8 product reads
    x from `x_rows`."""
    return _launch(
        linear,
        x_mk,
        stream.residual_mn,
        "residual",
        stream,
        gain_n=gain_n,
        split=split,
        x_rows=x_rows,
        y_rows=stream.quantized if quantize else None,
    )


def add_for(
    next_reads_eight: bool,
    linear: SkinnyLinear,
    x_mk: Tensor,
    stream: ResidualStream,
    gain_n: Tensor,
    split: SplitScratch,
    x_rows: QuantizedRows | None,
) -> list[Launch]:
    """`add_residual` before a product that reads e4m3, or does not."""
    num_rows = x_mk.shape[0]
    quantize = next_reads_eight and linear.makes_groups(num_rows)
    added = add_residual(linear, x_mk, stream, gain_n, split, x_rows=x_rows, quantize=quantize)
    if quantize or not next_reads_eight:
        return [added]
    assert stream.quantized is not None
    return [added, quantized(stream.gained_mn[:num_rows], stream.quantized)]


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
    *,
    partials: int = 0,
    gain_n: Tensor | None = None,
    split: SplitScratch | None = None,
    eps: float = 0.0,
    x_rows: QuantizedRows | None = None,
    y_rows: QuantizedRows | None = None,
) -> Launch:
    """`x_rows`: x in e4m3, if the product reads it so; `y_rows`: what the next product reads is left there."""
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
    }
    tiles = linear.n // config.block_n
    if isinstance(config, Gemv):
        rows = {"y_n": y_mn, "residual_n": stream.residual_mn, "gained_n": stream.gained_mn}
        return Launch(
            gemv, (tiles,), {"x_k": x_mk, "weight_nk": linear.weight, **rows, **args}, constants, config.warps
        )
    kernel, describe = _ring_parts()
    assert config.split_k == 1 or split is not None, "only the residual epilogue may split k"
    x_scale_gm = squares_f
    if linear.scale is not None:
        assert x_rows is not None, "an fp8 product reads rows in e4m3"
        assert config.block_k == GROUP
        x_mk, x_scale_gm = x_rows.numbers(num_rows, linear.k), x_rows.scale_f
    gained_mn, _ = stream.gained_for(num_rows, epilogue == "residual" and y_rows is not None)
    args |= {
        "x_scale_gm": x_scale_gm,
        "x_desc": describe(x_mk, [config.block_m, config.block_k]),
        "weight_desc": describe(linear.weight, [config.block_n, config.block_k]),
        "y_mn": y_mn,
        "y_scale_gm": squares_f if y_rows is None else y_rows.scale_f,
        "residual_mn": stream.residual_mn,
        "gained_mn": gained_mn,
        "split_acc": squares_f if split is None else split.acc_f,
        "split_count": squares_f if split is None else split.count_f,
        "num_rows": num_rows,
    }
    constants |= {
        "BLOCK_M": config.block_m,
        "SPLIT_K": config.split_k,
        "STAGES": config.stages,
        "QUANTIZE": y_rows is not None,
        "SWAP_AB": config.swap,
        "WARPS": config.warps,
    }
    return Launch(kernel, (tiles, config.split_k), args, constants, config.warps)
