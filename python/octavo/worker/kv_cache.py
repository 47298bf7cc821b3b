"""The KV cache: one tensor a lane (cache_groups.py), zeroed once, so that what padding rows read from the null block is
a number.

Shape: `cache_shape` of the layers' specs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.attention.base import CacheSpec, StateSpec
from octavo.worker.cache_groups import CacheLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn}
"""By the name that --dtype or --kv-cache-dtype gives."""


def allocate_kv_cache(
    specs: Sequence[CacheSpec],
    layout: CacheLayout,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """One cache a spec, in the order of `spec.layer`; layers of one lane have the same tensor. States are in fp32."""
    ordered = sorted(specs, key=lambda spec: spec.layer)
    assert [spec.layer for spec in ordered] == list(range(len(ordered))), "layers index the list of caches"
    lanes: dict[int, Tensor] = {}
    caches = []
    for spec, lane in zip(ordered, layout.layer_lanes, strict=True):
        shape = spec.cache_shape(num_blocks, block_size)
        if lane not in lanes:
            kept = torch.float32 if isinstance(spec, StateSpec) else dtype
            lanes[lane] = torch.zeros(shape, dtype=kept, device=device)
        assert lanes[lane].shape == shape, "layers of one lane have caches of one shape"
        caches.append(lanes[lane])
    return caches


def distinct(caches: Sequence[Tensor]) -> list[Tensor]:
    """One cache a lane: what is to be done to a block is done to each of these."""
    return list({id(cache): cache for cache in caches}.values())
