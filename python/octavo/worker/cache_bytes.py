"""How many bytes a block of the cache takes, and how long blocks are where layers keep states. Pure.

Not here: which layers share a block (cache_groups.py), and how many blocks there are (memory.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.worker.resolve import kv_dtype

if TYPE_CHECKING:
    from octavo.models.config import NormalConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
KV_SCALE_BYTES = {"int8": 4}
"""Behind the numbers of one token in one head."""
STATE_BYTES = 4
"""Of a state's number."""
STATE_BLOCK_SIZE = 256
"""Tokens between two states that are kept, where all layers keep states."""
STATE_BLOCK_STEP, MAX_STATE_BLOCK = 64, 4096
"""Where others attend, a multiple, and the most."""
STATE_TILE = 16
"""Tokens of the least tile of their kernels, which must not cross blocks."""


def attended_bytes(model: NormalConfig, dtype: str) -> int:
    """Bytes of K and V (or of latents) of one token in one layer."""
    planes = 1 if model.value_dim else 2
    row_bytes = model.head_dim * DTYPE_BYTES[dtype] + KV_SCALE_BYTES.get(dtype, 0)
    return planes * model.num_kv_heads * row_bytes


def layer_bytes(model: NormalConfig, dtype: str, block_size: int) -> list[int]:
    """Bytes that each layer with a cache has in a block."""
    attended = attended_bytes(model, dtype) * block_size
    return [STATE_BYTES * size or attended for size in model.state_sizes or (0,) * len(model.layer_windows)]


def kv_token_bytes(model: NormalConfig, dtype: str, block_size: int = 1) -> int:
    """Bytes of one token in all layers; of states, a token's share of a block's."""
    return sum(math.ceil(size / block_size) for size in layer_bytes(model, dtype, block_size))


def state_block_size(model: NormalConfig, dtype: str) -> int:
    """Tokens of a block whose keys and values take about as many bytes as the largest state, where layers keep either;
    where all keep states, there is no such bound."""
    if all(model.state_sizes):
        return STATE_BLOCK_SIZE
    steps = math.ceil(STATE_BYTES * max(model.state_sizes) / attended_bytes(model, dtype) / STATE_BLOCK_STEP)
    return STATE_BLOCK_STEP * min(steps, MAX_STATE_BLOCK // STATE_BLOCK_STEP)


def with_state_blocks(config: EngineConfig, model: NormalConfig, *, is_asked: bool) -> EngineConfig:
    """The config with blocks for a model that keeps states; `is_asked`: it has a block size of the user's. ConfigError:
    the kernels have no tiles for that."""
    size = config.cache.block_size if is_asked else state_block_size(model, kv_dtype(config))
    assert size is not None
    if config.execution.device.startswith("cuda") and size % STATE_TILE:
        raise ConfigError(
            f"--block-size {size}: {model.architecture} keeps states, whose kernels need a multiple of {STATE_TILE}",
            "block_size",
        )
    return replace(config, cache=replace(config.cache, block_size=size))
