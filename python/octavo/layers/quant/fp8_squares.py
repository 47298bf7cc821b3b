"""Linear layers of fp8 checkpoints with a scale for every square of 128 x 128 weights (DeepSeek-V3, Qwen3's FP8 ones):
numbers and scales are the checkpoint's, bit by bit. Activations are quantized as they come, by groups of 128 features
of a row; one row alone stays as it is (kernels/triton/square_gemm.py).

A device without fp8 products gets the numbers that they stand for in the model's dtype. Decode steps of up to 128 rows
go through layers/fused where it runs. Experts are layers/moe.py's.

Shape suffixes: t tokens, i input features, o output features, g groups of 128 input features, s groups of output
features with equal scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from octavo.kernels.reference.quantize_rows import FP8
from octavo.kernels.reference.squares import SIDE, dequantize_squares, num_groups
from octavo.kernels.triton.target import capability
from octavo.layers.linear import DENSE, Form, Linear
from octavo.layers.quant import fp8

WIDE_ROWS: Final = 1
"""Up to so many rows are not quantized, where gemv.py takes the matrix: the fused decode steps do the same."""
HOPPER: Final = 9
CUBLAS_SINCE: Final = (12, 9)
CUBLAS_OUTPUTS: Final = 16
CUBLAS_SCALES: Final = 4
"""Of cuBLAS's products with squares: the capability's major number, the first CUDA, and what the output features and
the scales along the inputs are multiples of."""
SQUARES = "weight_scale_squares"
"""What a slot of scales of squares is called, below its matrix' name."""


class Fp8Groups(NamedTuple):
    """A layer's input that is quantized already: e4m3 [t, i], and scales fp32 [g, t]."""

    number_ti: Tensor
    scale_gt: Tensor


class Fp8Squares:
    """`weight` e4m3 [o, i], `weight_scale` fp32 [s, g], `bias` [o] in the model's dtype."""

    form: Form = "squares"

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """See `LinearMethod.create`."""
        outputs, inputs = layer.out_features, layer.in_features

        def parameter(shape: tuple[int, ...], kind: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=kind, device=device), requires_grad=False)

        layer.share = _share(layer.shards.values())
        layer.weight = parameter((outputs, inputs), FP8)
        layer.weight_scale = parameter((num_groups(outputs, layer.share), num_groups(inputs)), torch.float32)
        layer.bias = parameter((outputs,), dtype) if layer.has_bias else None

    def slots(self, layer: Linear) -> dict[str, Tensor]:
        """See `LinearMethod.slots`; the dense layer's names, and `<shard>.weight_scale_squares`: a scale a square, the
        first of those that are equal."""
        repeats = SIDE // layer.share
        return DENSE.slots(layer) | {f"{name}.{SQUARES}": scale[::repeats] for name, scale in _parts(layer).items()}

    def finish(self, layer: Linear) -> None:
        """See `LinearMethod.finish`. Where the device has no fp8 products, the layer becomes a dense one with the
        weights' values."""
        repeats = SIDE // layer.share
        for scale_sg in _parts(layer).values():
            first = scale_sg[::repeats].clone()
            scale_sg.copy_(first.repeat_interleave(repeats, 0)[: len(scale_sg)])
        if fp8.multiplies_fp8(layer.weight.device):
            return
        assert layer.weight_scale is not None
        values = dequantize_squares(layer.weight, layer.weight_scale, layer.share).to(layer.dtype)
        layer.weight = nn.Parameter(values, requires_grad=False)
        layer.weight_scale, layer.share = None, 0
        layer.method = DENSE

    def apply(self, layer: Linear, x_ti: Tensor | Fp8Groups) -> Tensor:
        """See `LinearMethod.apply`. No host synchronization; safe in a CUDA graph capture."""
        from octavo.kernels.triton import square_gemm  # these load Triton
        from octavo.kernels.triton.handles import only_compiling
        from octavo.kernels.triton.quantize_rows import quantize_rows

        assert layer.weight_scale is not None
        if isinstance(x_ti, Tensor) and not x_ti.shape[0]:
            return x_ti.new_empty(0, layer.out_features)
        matrix = square_gemm.Squares(layer.weight, layer.weight_scale, layer.share)
        if isinstance(x_ti, Tensor):
            if x_ti.shape[0] <= WIDE_ROWS and square_gemm.takes_vector(matrix):
                y_to = square_gemm.vector_product(x_ti[:WIDE_ROWS], matrix, layer.bias, layer.dtype)
                if not only_compiling():
                    return y_to
            x_ti = Fp8Groups(*quantize_rows(x_ti, group=SIDE))
        if cublas_takes(layer):
            return by_cublas(x_ti, layer.weight, layer.weight_scale, layer.bias)
        return square_gemm.square_product(x_ti, matrix, layer.bias, layer.dtype)


def cublas_takes(layer: Linear) -> bool:
    """Whether cuBLAS multiplies by the layer's squares: on Hopper, from CUDA 12.9 on, in bf16, where they have the form
    that it reads. There it takes 60 to 70% of the time of square_gemm.py (H200, Llama-3.1-8B's shapes, 128 to 8192
    rows)."""
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    is_able = capability(layer.weight.device)[0] == HOPPER and cuda >= CUBLAS_SINCE and layer.dtype == torch.bfloat16
    return is_able and cublas_reads(layer.out_features, layer.in_features, layer.share)


def cublas_reads(outputs: int, inputs: int, share: int) -> bool:
    """Whether scales of such a matrix lie as cuBLAS wants them: whole squares, and along the inputs a multiple of
    CUBLAS_SCALES, since it steps over them in such multiples however many there are."""
    return share == SIDE and inputs % (CUBLAS_SCALES * SIDE) == 0 and outputs % CUBLAS_OUTPUTS == 0


def by_cublas(x: Fp8Groups, weight_oi: Tensor, scale_sg: Tensor, bias_o: Tensor | None) -> Tensor:
    """The product [t, o] in bf16."""
    from octavo.kernels.triton.quantize_rows import filled_up  # loads Triton

    number_ti, scale_gt = filled_up(*x)
    out_to = torch._scaled_mm(
        number_ti,
        weight_oi.t(),
        scale_a=scale_gt.t(),
        scale_b=scale_sg.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )[: x.number_ti.shape[0]]
    return out_to if bias_o is None else out_to + bias_o


FP8_SQUARES = Fp8Squares()


def _share(sizes: Iterable[int]) -> int:
    """Output features that have equal scales, of a matrix stacked from parts of so many: SIDE, or less where a part
    does not begin at a multiple of it."""
    ends = list(accumulate(sizes))
    return math.gcd(SIDE, *ends[:-1])


def _parts(layer: Linear) -> dict[str, Tensor]:
    """The scales of each part, by its checkpoint name."""
    assert layer.weight_scale is not None
    share, start, found = layer.share, 0, {}
    for name, size in layer.shards.items():
        found[name] = layer.weight_scale[start // share : num_groups(start + size, share)]
        start += size
    return found
