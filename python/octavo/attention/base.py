"""The attention seam: what a layer says of itself, what a step says of its rows, and what a backend must do.

Layers (layers/attention.py) hold an `AttentionSpec`; the runner builds one `ForwardContext` a step; a backend (one file
each here) reads both. Models never see a backend.

Shape suffixes: t tokens of the step, r rows, s slots, b blocks, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from octavo.attention.media import MediaInput
from octavo.kernels.reference.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer, as the model's config describes it."""

    layer: int
    """Index into `ForwardContext.kv_cache`."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    """A token attends to itself and the `window - 1` tokens before it; 0 = all."""
    soft_cap: float = 0.0
    """Scores become soft_cap * tanh(score / soft_cap); 0 = off (Gemma 2, section 2)."""
    chunk: int = 0
    """Positions are cut into chunks of so many, and a token attends within its own (Llama 4); 0 = they are not."""
    value_dim: int = 0
    """The cache holds no V: a head's V is the first `value_dim` dims of its K (latent attention, DeepSeek-V2, section
    2.1); 0 = V has a place of its own, and `head_dim` dims."""

    @property
    def out_dim(self) -> int:
        """Of a head's output."""
        return self.value_dim or self.head_dim

    @property
    def is_plain(self) -> bool:
        """Keys and values have places of their own, and no chunks."""
        return not self.value_dim and not self.chunk

    def cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, int, int, int, int]:
        """Of its tensor in `ForwardContext.kv_cache`."""
        return num_blocks, 1 if self.value_dim else 2, self.num_kv_heads, block_size, self.head_dim


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A layer that keeps a state of a sequence instead of keys and values: a block has one, after the last of its
    positions that was computed."""

    layer: int
    """Index into `ForwardContext.kv_cache`."""
    size: int
    """Numbers of a state, fp32."""

    def cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Of its tensor in `ForwardContext.kv_cache`."""
        return num_blocks, self.size


CacheSpec = AttentionSpec | StateSpec
"""A layer that keeps something of a sequence."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the layers of a cache group have their keys and values."""

    block_table_sb: Tensor
    """int32 [num_slots, max_blocks_per_slot] block ids; of an entry that its layers don't read, or not any more, the
    id means nothing (but is one)."""
    slot_mapping_t: Tensor
    """int64: block * block_size + offset, where token t's K and V are written."""


@dataclass(slots=True)
class ForwardContext:
    """One step's rows and where their KV lives. Tensors are on the model's device, int32 unless said otherwise.

    Row r owns tokens query_start_r[r] .. query_start_r[r + 1]; its last token's position is kv_len_r[r] - 1. Rows
    [0, num_decode_rows) have exactly one token. `kv_len` counts the tokens of this step too: backends write K and V
    first and then read everything from the cache.
    """

    kv_cache: list[Tensor]
    """Per layer [num_blocks, 2 (K, V), num_kv_heads, block_size, head_dim]; see `AttentionSpec.cache_shape`. Layers of
    different cache groups may have one tensor, and different blocks of it."""
    block_table_sb: Tensor
    """Of the first cache group; a layer's own is in `places`."""
    row_slot_r: Tensor
    query_start_r: Tensor
    """[num_rows + 1]"""
    kv_len_r: Tensor
    position_t: Tensor
    """int64"""
    slot_mapping_t: Tensor
    """Of the first cache group; a layer's own is in `places`."""
    block_size: int
    num_rows: int
    num_decode_rows: int
    num_tokens: int
    max_query_len: int
    max_kv_len: int
    """On the host, an upper bound under CUDA graphs."""
    num_decode_rows_1: Tensor | None = None
    """[1], if only the device knows how many rows decode: `num_decode_rows` is then the most there can be, rows
    without tokens may follow the last one, and at most `num_rows - num_decode_rows` rows have more than one token."""
    media: MediaInput | None = None
    """Of a step in which tokens stand for images."""
    rope_position_3t: Tensor | None = None
    """int64, of models that number positions in three dimensions (time, height, width): what rotations go by."""
    shared_2: Tensor | None = None
    """(a slot, how many blocks): decode rows whose tables have the last of these blocks where that slot's table has it
    may read all of them together, which is quicker. None: there is nothing to be gained."""
    layer_groups: Sequence[int] = ()
    """Of each layer, which cache group it is in; empty: there is one."""
    more_places: Sequence[Places] = ()
    """Of the cache groups but the first."""
    states: dict[int, StateRows] = field(default_factory=dict)
    """By cache group, what `state_rows` found."""
    scratch: dict[str, Tensor] = field(default_factory=dict)
    """What a backend computed in `prepare` for all layers of the step."""

    def group(self, layer: int) -> int:
        """A layer's cache group."""
        return self.layer_groups[layer] if self.layer_groups else 0

    def places(self, layer: int) -> Places:
        """Those of a layer's cache group."""
        group = self.group(layer)
        return self.more_places[group - 1] if group else Places(self.block_table_sb, self.slot_mapping_t)

    def state_rows(self, layer: int) -> StateRows:
        """Where the layers of a cache group, which keep states, have them."""
        group = self.group(layer)
        if group not in self.states:
            self.states[group] = StateRows(
                block_table_sb=self.places(layer).block_table_sb,
                row_slot_r=self.row_slot_r,
                query_start_r=self.query_start_r,
                kv_len_r=self.kv_len_r,
                block_size=self.block_size,
                num_rows=self.num_rows,
                num_decode_rows=self.num_decode_rows,
                max_query_len=self.max_query_len,
                num_decode_rows_1=self.num_decode_rows_1,
            )
        return self.states[group]


class AttentionBackend(Protocol):
    """Paged attention over `ForwardContext.kv_cache`."""

    def prepare(self, ctx: ForwardContext) -> None:
        """Once a step, before the first layer (split tables, masks)."""

    def attend(
        self,
        spec: AttentionSpec,
        q_thd: Tensor,
        k_tgd: Tensor,
        v_tgd: Tensor,
        ctx: ForwardContext,
        sink_h: Tensor | None = None,
    ) -> Tensor:
        """Write k and v at `slot_mapping_t`, then return the attention output [t, h, out_dim] in q's dtype.

        With `sink_h`, the softmax of head h has one more score, sink_h[h], that weighs nothing (gpt-oss). `v_tgd` is
        not read where the cache holds no V."""

    def attend_cached(
        self, spec: AttentionSpec, q_thd: Tensor, ctx: ForwardContext, sink_h: Tensor | None = None
    ) -> Tensor:
        """`attend` after k and v have been written."""


def dense_heads(x_thd: Tensor) -> Tensor:
    """The same numbers with each token's heads dense and tokens ascending in memory; a copy only if they are not.

    Slices of a fused projection pass as they are, transposed views (the Transformers path) do not.
    """
    tokens, heads, dim = x_thd.shape
    strides = x_thd.stride()
    dense = strides[2] == 1 and (heads == 1 or strides[1] == dim) and (tokens <= 1 or strides[0] >= heads * dim)
    return x_thd if dense else x_thd.contiguous()


BACKENDS = {
    "reference": "octavo.attention.reference:ReferenceAttention",
    "cpu": "octavo.attention.cpu:CpuAttention",
    "triton": "octavo.attention.triton:TritonAttention",
    "flash": "octavo.attention.flash:flash_attention",
    "flashinfer": "octavo.attention.flashinfer:flashinfer_attention",
}


def make_backend(name: str, *, num_threads: int = 0, deterministic: bool = False) -> AttentionBackend:
    """Build a backend by its name in `BACKENDS`; "auto" is resolved before (worker/resolve.py). `deterministic`: a
    row's results do not depend on other rows, nor on how many of its tokens are in the step ("triton" only)."""
    module, attribute = BACKENDS[name].split(":")
    factory: Callable[..., AttentionBackend] = getattr(import_module(module), attribute)
    options: dict[str, dict[str, Any]] = {
        "cpu": {"num_threads": num_threads},
        "triton": {"deterministic": deterministic},
    }
    return factory(**options.get(name, {}))
