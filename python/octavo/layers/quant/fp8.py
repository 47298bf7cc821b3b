"""Linear layers in fp8: weights in e4m3 with a scale an output channel, activations quantized row by row as they come.

What checkpoints hold (one scale a tensor or a channel, or no fp8 at all) becomes that form when it is loaded:
fp8_tensors.py; scales of squares stay (fp8_squares.py). A device without fp8 products gets the same rounded weights in
the model's dtype.

Decode steps of up to 128 rows go through layers/fused where it runs; what is here multiplies everything else.

Shape suffixes: t tokens, i input features, o output features.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from octavo.kernels.reference.quantize_rows import FP8, dequantize_rows
from octavo.kernels.triton.target import capability
from octavo.layers.linear import DENSE, Form, Linear

ROWWISE_TOKENS: Final = 65
"""From so many rows on, cuBLAS applies the scales itself. Its kernels for that are up to 2.4 times slower than those
for one scale at 16 to 64 rows (H200, Llama-3.1-8B's shapes)."""
LEAST_CAPABILITY: Final = (8, 9)
"""Of CUDA devices that multiply e4m3."""


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device has fp8 products."""
    return capability(device) >= LEAST_CAPABILITY


class Fp8Rows(NamedTuple):
    """A layer's input that is quantized already: e4m3 [t, i], and scales fp32 [t]."""

    number_ti: Tensor
    scale_t: Tensor


class Fp8:
    """`weight` e4m3 [o, i], `weight_scale` fp32 [o], `bias` [o] in the model's dtype."""

    form: Form = "channels"

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """See `LinearMethod.create`."""

        def parameter(shape: tuple[int, ...], kind: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=kind, device=device), requires_grad=False)

        channels = (layer.out_features,)
        layer.weight = parameter((*channels, layer.in_features), FP8)
        layer.weight_scale = parameter(channels, torch.float32)
        layer.bias = parameter(channels, dtype) if layer.has_bias else None

    def slots(self, layer: Linear) -> dict[str, Tensor]:
        """See `LinearMethod.slots`; the dense layer's names, and `<shard>.weight_scale` [o]."""
        assert layer.weight_scale is not None
        found = DENSE.slots(layer)
        start = 0
        for name, size in layer.shards.items():
            found[f"{name}.weight_scale"] = layer.weight_scale.narrow(0, start, size)
            start += size
        return found

    def finish(self, layer: Linear) -> None:
        """Where the device has no fp8 products, the layer becomes a dense one with the weights' values."""
        if multiplies_fp8(layer.weight.device):
            _one(layer.weight.device)  # not first within a graph's capture, which would fill it at replays only
            return
        assert layer.weight_scale is not None
        values = dequantize_rows(layer.weight, layer.weight_scale).to(layer.dtype)
        layer.weight = nn.Parameter(values, requires_grad=False)
        layer.weight_scale = None
        layer.method = DENSE

    def apply(self, layer: Linear, x_ti: Tensor | Fp8Rows) -> Tensor:
        """See `LinearMethod.apply`. No host synchronization; safe in a CUDA graph capture."""
        assert layer.weight_scale is not None
        if isinstance(x_ti, Tensor):
            from octavo.kernels.triton.quantize_rows import quantize_rows  # loads Triton

            x_ti = Fp8Rows(*quantize_rows(x_ti))
        multiply = rowwise if x_ti.scale_t.shape[0] >= ROWWISE_TOKENS else tensorwise
        return multiply(x_ti, layer.weight, layer.weight_scale, layer.bias).to(layer.dtype)


def rowwise(x: Fp8Rows, weight_oi: Tensor, scale_o: Tensor, bias_o: Tensor | None) -> Tensor:
    """The product [t, o] in bf16; the scales of both operands' rows are applied inside."""
    out_to = torch._scaled_mm(
        x.number_ti,
        weight_oi.t(),
        scale_a=x.scale_t[:, None],
        scale_b=scale_o[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out_to if bias_o is None else out_to + bias_o


def tensorwise(x: Fp8Rows, weight_oi: Tensor, scale_o: Tensor, bias_o: Tensor | None) -> Tensor:
    """The same; a kernel of its own applies the scales to what comes out."""
    from octavo.kernels.triton.scale_product import scale_product  # loads Triton

    one = _one(weight_oi.device)
    out_to = torch._scaled_mm(
        x.number_ti, weight_oi.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return scale_product(out_to, x.scale_t, scale_o, bias_o)


@cache
def _one(device: torch.device) -> Tensor:
    """Made once: each time would be a launch."""
    return torch.ones((), device=device)


FP8_LINEAR = Fp8()
