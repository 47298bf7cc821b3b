"""The KV cache: one tensor a layer, zeroed once, so that what padding rows read from the null block is a number.

Shape: `AttentionSpec.cache_shape`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.attention.base import AttentionSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn}
"""By the name that --dtype or --kv-cache-dtype gives."""


def allocate_kv_cache(
    specs: Sequence[AttentionSpec], *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """One cache a spec, in the order of `AttentionSpec.layer`."""
    ordered = sorted(specs, key=lambda spec: spec.layer)
    assert [spec.layer for spec in ordered] == list(range(len(ordered))), "layers index the list of caches"
    return [torch.zeros(spec.cache_shape(num_blocks, block_size), dtype=dtype, device=device) for spec in ordered]
