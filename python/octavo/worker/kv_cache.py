"""The KV cache: one tensor a lane (cache_groups.py), zeroed once, so that what padding rows read from the null block is
a number. Layers see their lane in their own shape: `cache_shape` of their specs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.base import CacheSpec, StateSpec
from octavo.worker.cache_groups import CacheLayout, lane_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn}
"""By the name that --dtype or --kv-cache-dtype gives."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """`layers[i]` is the cache of the layer with that number; blocks of a lane may be further apart than its layers'
    numbers go."""

    layers: list[Tensor]
    lanes: list[Tensor]
    """uint8 [num_blocks, bytes]: what is to be done to a block is done to each of these."""


def layer_dtype(spec: CacheSpec, dtype: torch.dtype) -> torch.dtype:
    """Of a layer's cache; states are in fp32."""
    return torch.float32 if isinstance(spec, StateSpec) else dtype


def allocate_kv_cache(
    specs: Sequence[CacheSpec],
    layout: CacheLayout,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KvCache:
    """One cache a spec, in the order of `spec.layer`; layers of one lane share memory."""
    ordered = sorted(specs, key=lambda spec: spec.layer)
    assert [spec.layer for spec in ordered] == list(range(len(ordered))), "layers index the list of caches"
    shapes = [(spec.cache_shape(num_blocks, block_size), layer_dtype(spec, dtype)) for spec in ordered]
    sizes = [math.prod(shape[1:]) * kept.itemsize for shape, kept in shapes]
    lanes = [torch.zeros((num_blocks, size), dtype=torch.uint8, device=device) for size in lane_bytes(layout, sizes)]
    layers = [
        torch.unflatten(lanes[lane][:, :size].view(kept), 1, shape[1:])
        for lane, size, (shape, kept) in zip(layout.layer_lanes, sizes, shapes, strict=True)
    ]
    return KvCache(layers, lanes)
