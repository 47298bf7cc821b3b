"""fp8 weights on their way from a checkpoint into a model: every layer gets them in the form that it keeps.

A checkpoint's layer is plain, or in fp8 with scales of the whole tensor, of channels or of blocks; a model's layer is
dense, or in e4m3 with one scale a channel (fp8.py) or a square of 128 x 128 (fp8_squares.py); experts are as layers.
These pairs occur:

| checkpoint | into a dense layer | into a layer with scales of channels | of squares |
|---|---|---|---|
| plain | as it is | quantized, its scale the best of 16: about 2.5% of a channel's norm | refused |
| fp8, tensor or channel | exact in fp32 | exact: a tensor's scale is repeated | refused |
| fp8, blocks of 128 x 128 | exact in fp32 | (experts of odd sizes) as other blocks | as they are |
| fp8, other blocks | exact in fp32 | quantized again: the same error once more, about 3.6% in all | refused |

Shape suffixes: o output features, i input features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.kernels.reference.quantize_rows import FP8, dequantize_rows, quantize_weights
from octavo.kernels.reference.squares import quantize_squares
from octavo.kernels.triton.target import capability
from octavo.layers.moe import Merged
from octavo.layers.quant.fp8 import LEAST_CAPABILITY
from octavo.layers.quant.fp8_squares import SQUARES
from octavo.layers.quant.stored import Quantization

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("weight_scale", "weight_scale_inv", SQUARES)
"""All multiply the stored numbers, whatever the second one's name says; the last one is what a model calls it."""
UNUSED = ("input_scale", "output_scale", "activation_scale", "k_scale", "v_scale", "q_scale", "attn_scale")
"""Scales of activations and of an fp8 KV cache."""
MAX_NAMED = 5
"""Layers that an error lists."""


def as_kept(
    tensors: Iterable[tuple[str, Tensor]],
    slots: Mapping[str, Tensor],
    quantization: Quantization | None,
    merged: Mapping[str, Merged] = MappingProxyType({}),
    *,
    rounds_squares: bool = False,
    passes: Callable[[str], bool] = lambda layer: False,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors as a model with these slots keeps them (an fp8 layer has a slot `<layer>.weight_scale`, or of
    squares; plain matrices of all experts in one, `<name>_scale` among the `merged` ones). `rounds_squares`: plain
    matrices that were fused from dequantized ones may become squares. `passes`: numbers and scales of these layers are
    left as they are, for who comes next.

    A layer's tensors are held back until it is complete. ModelError: a scale without a weight or the reverse, or scales
    of no known shape.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        layer, _, kind = name.rpartition(".")
        is_fp8 = kind == "weight" and tensor.dtype in FLOAT8
        into_squares = kind == "weight" and not is_fp8 and f"{layer}.{SQUARES}" in slots
        if into_squares and not rounds_squares:
            raise ModelError(f"{name} is {tensor.dtype}, but config.json's quantization_config says fp8 in blocks")
        if into_squares:
            number_oi, scale = quantize_squares(tensor.to(slots[name].device))
            yield from ((name, number_oi), (f"{layer}.{SQUARES}", scale))
        elif (is_fp8 or kind in SCALES) and passes(layer):
            yield name, tensor
        elif is_fp8 or (kind in SCALES and quantization is not None):
            parts = waiting.setdefault(layer, {})
            parts["weight" if is_fp8 else "scale"] = tensor
            if len(parts) == 2:
                del waiting[layer]
                yield from _stored_fp8(layer, parts["weight"], parts["scale"], slots, quantization)
        elif kind == "weight" and f"{layer}.weight_scale" in slots:
            yield from _quantized(layer, tensor.to(slots[name].device))
        elif f"{name}_scale" in merged:
            yield from _quantized_together(name, tensor.to(merged[name].slot.device))
        elif kind not in UNUSED or quantization is None:
            yield name, tensor
    if waiting:
        layers = ", ".join(sorted(waiting)[:MAX_NAMED]) + (", …" if len(waiting) > MAX_NAMED else "")
        if quantization is None:
            raise ModelError(
                f"the checkpoint has fp8 weights ({layers}), but its config.json has no quantization_config that says "
                "how they are scaled: use the config.json that came with them"
            )
        raise ModelError(f"the checkpoint has fp8 weights without their weight_scale, or scales alone, of {layers}")


def _rounded(weight_oi: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and scales of channels, by a kernel where there is one."""
    if capability(weight_oi.device) < LEAST_CAPABILITY:
        return quantize_weights(weight_oi)
    from octavo.kernels.triton import quantize_rows  # loads Triton

    return quantize_rows.quantize_weights(weight_oi)


def _quantized(layer: str, weight_oi: Tensor) -> Iterator[tuple[str, Tensor]]:
    number_oi, scale_o = _rounded(weight_oi)
    yield f"{layer}.weight", number_oi
    yield f"{layer}.weight_scale", scale_o


def _quantized_together(name: str, weight_eoi: Tensor) -> Iterator[tuple[str, Tensor]]:
    number_oi, scale_o = _rounded(weight_eoi.flatten(0, 1))
    yield name, number_oi.view(weight_eoi.shape)
    yield f"{name}_scale", scale_o.view(weight_eoi.shape[:2])


def _stored_fp8(
    layer: str, number_oi: Tensor, scale: Tensor, slots: Mapping[str, Tensor], quantization: Quantization | None
) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's fp8 layer, on the slots' device."""
    slot = slots.get(f"{layer}.weight")
    device = number_oi.device if slot is None else slot.device
    number_oi, scale = number_oi.to(device), scale.to(device).float()
    squares = slots.get(f"{layer}.{SQUARES}")
    if squares is not None and number_oi.dtype == FP8 and scale.shape == squares.shape:
        yield f"{layer}.weight", number_oi
        yield f"{layer}.{SQUARES}", scale
        return
    if squares is not None:
        found, wanted = list(scale.shape), list(squares.shape)
        raise ModelError(f"{layer}: {number_oi.dtype} with scales of shape {found}, not {FP8} with {wanted}")
    scale_o = channel_scales(number_oi, scale)
    keeps_fp8 = f"{layer}.weight_scale" in slots
    if scale_o is not None and keeps_fp8 and number_oi.dtype == FP8:
        yield f"{layer}.weight", number_oi
        yield f"{layer}.weight_scale", scale_o
        return
    if scale_o is not None:
        weight_oi = dequantize_rows(number_oi, scale_o)
    else:
        weight_oi = dequantize_blocks(layer, number_oi, scale, None if quantization is None else quantization.block)
    if keeps_fp8:
        yield from _quantized(layer, weight_oi)
    else:
        yield f"{layer}.weight", weight_oi


def channel_scales(number_oi: Tensor, scale: Tensor) -> Tensor | None:
    """fp32 [o] from a tensor's or channels' scales; None where the scales are of neither shape."""
    channels = number_oi.shape[0]
    if scale.numel() == 1:
        return scale.reshape(1).expand(channels)
    if scale.shape in ((channels,), (channels, 1)):
        return scale.reshape(channels)
    return None


def dequantize_blocks(layer: str, number_oi: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """fp32 [o, i]; blocks at the borders may be partial."""
    if block is None:
        raise ModelError(f"{layer}: scales of shape {list(scale.shape)} are neither a tensor's nor a channel's")
    (rows, columns), (num_rows, num_columns) = block, number_oi.shape
    expected = (math.ceil(num_rows / rows), math.ceil(num_columns / columns))
    if tuple(scale.shape) != expected:
        raise ModelError(
            f"{layer}: scales of shape {list(scale.shape)} for blocks of {rows} x {columns}, not {list(expected)}"
        )
    scale_oi = scale.repeat_interleave(rows, 0)[:num_rows].repeat_interleave(columns, 1)[:, :num_columns]
    return number_oi.float() * scale_oi
