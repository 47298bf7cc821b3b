"""Checkpoints that keep all experts' matrices in one fp8 tensor (Qwen3-VL's, and what Transformers 5 writes): taken
apart, so that each expert's are as if they had come by themselves (fp8_tensors.py).

Shape suffixes: e experts, o output features, i input features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.layers.moe import Merged
from octavo.layers.quant.fp8_tensors import FLOAT8, MAX_NAMED, channel_scales, dequantize_blocks
from octavo.layers.quant.stored import Quantization

SCALE = "_scale_inv"
"""Behind the name of a matrix."""


def experts_apart(
    tensors: Iterable[tuple[str, Tensor]], merged: Mapping[str, Merged], quantization: Quantization | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with each expert's numbers and scales in the place of an fp8 tensor among the `merged` ones and its
    scales [e, …]. ModelError: one without the other, or scales of no known shape."""
    waiting: dict[str, dict[bool, Tensor]] = {}
    for name, tensor in tensors:
        whole = name.removesuffix(SCALE)
        is_scale = whole != name
        if whole not in merged or not (is_scale or tensor.dtype in FLOAT8):
            yield name, tensor
            continue
        found = waiting.setdefault(whole, {})
        found[is_scale] = tensor
        if len(found) == 2:
            del waiting[whole]
            yield from _apart(whole, found[False], found[True], merged[whole], quantization)
    if waiting:
        names = ", ".join(sorted(waiting)[:MAX_NAMED])
        raise ModelError(f"the checkpoint has experts in fp8 without their {SCALE}, or scales alone, of {names}")


def _apart(
    name: str, number_eoi: Tensor, scale: Tensor, place: Merged, quantization: Quantization | None
) -> Iterator[tuple[str, Tensor]]:
    if number_eoi.shape != place.slot.shape and number_eoi.mT.shape == place.slot.shape:
        number_eoi, scale = number_eoi.mT, scale.mT if scale.ndim > 2 else scale  # Qwen3-VL's are [e, i, o]
    if number_eoi.shape != place.slot.shape or len(scale) != len(number_eoi):
        found, wanted = list(number_eoi.shape), list(place.slot.shape)
        raise ModelError(f"{name} is {found} with scales of {list(scale.shape)}, not {wanted} with some of each expert")
    if len(place.names) == 1:
        yield name, torch.stack([_wide(name, *expert, quantization) for expert in zip(number_eoi, scale, strict=True)])
        return
    each = len(place.names) // len(number_eoi)
    for expert, (number_oi, own) in enumerate(zip(number_eoi, scale, strict=True)):
        names = place.names[expert * each : (expert + 1) * each]
        scales = _parts(own, each, len(number_oi), quantization)
        if scales is None:
            yield from zip(names, _wide(name, number_oi, own, quantization).chunk(each), strict=True)
            continue
        for part, number, part_scale in zip(names, number_oi.chunk(each), scales, strict=True):
            yield part, number.contiguous()
            yield f"{part}_scale", part_scale.contiguous()


def _parts(scale: Tensor, each: int, num_rows: int, quantization: Quantization | None) -> list[Tensor] | None:
    """The scales of each of `each` equal parts of a matrix' rows; None: a block reaches from one part into the next."""
    if scale.numel() == 1:
        return [scale.reshape(1)] * each
    block = None if quantization is None else quantization.block
    if block is not None and (num_rows // each) % block[0] and each > 1:
        return None
    return list(scale.chunk(each))


def _wide(name: str, number_oi: Tensor, scale: Tensor, quantization: Quantization | None) -> Tensor:
    scale_o = channel_scales(number_oi, scale.float())
    if scale_o is not None:
        return number_oi.float() * scale_o[:, None]
    return dequantize_blocks(name, number_oi, scale.float(), None if quantization is None else quantization.block)
