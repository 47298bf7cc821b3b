"""The attention backend of CPUs: hands tensors' addresses to the Rust kernels (rust/cpu)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import _core
from octavo.attention.base import AttentionSpec, ForwardContext, dense_heads
from octavo.attention.reference import ReferenceAttention

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _address(name: str, tensor: Tensor, dtype: torch.dtype) -> int:
    """Address of a dense CPU tensor of a dtype. The kernels check sizes and indices, not this."""
    if tensor.device.type != "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{name} must be a contiguous {dtype} tensor on the CPU, not {tensor.dtype} {tensor.device}")
    return tensor.data_ptr()


def _tokens(name: str, x_thd: Tensor, like: Tensor, heads: int, dim: int, num_tokens: int) -> tuple[Tensor, int]:
    """[t, h, d] with each token's heads dense (a copy if need be), and the elements between tokens."""
    if x_thd.device.type != "cpu" or x_thd.dtype != like.dtype:
        raise ValueError(f"{name} must be {like.dtype} on the CPU as the cache is, not {x_thd.dtype} {x_thd.device}")
    if x_thd.shape != (num_tokens, heads, dim):
        raise ValueError(f"{name} must be {(num_tokens, heads, dim)}, not {tuple(x_thd.shape)}")
    dense = dense_heads(x_thd)
    return dense, max(dense.stride(0), heads * dim)


class CpuAttention:
    """Paged attention with online softmax in fp32; fp32, bf16 and fp16. Sinks, chunks, caches without V, and caches
    whose blocks lie apart, which the kernels do not know, go through PyTorch."""

    def __init__(self, num_threads: int = 0) -> None:
        """`num_threads` 0: as many as torch uses."""
        self.num_threads = num_threads or torch.get_num_threads()
        self._plain_torch = ReferenceAttention()

    def prepare(self, ctx: ForwardContext) -> None:
        """Nothing is shared between layers."""

    def attend(
        self,
        spec: AttentionSpec,
        q_thd: Tensor,
        k_tgd: Tensor,
        v_tgd: Tensor,
        ctx: ForwardContext,
        sink_h: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`. Tensors that the kernels can't read, or indices out of range: ValueError."""
        if not _is_known(spec, ctx, sink_h):
            return self._plain_torch.attend(spec, q_thd, k_tgd, v_tgd, ctx, sink_h)
        cache = _cache(spec, ctx)
        self._write(spec, k_tgd, v_tgd, ctx, cache)
        return self._attend(spec, q_thd, ctx, cache)

    def attend_cached(
        self, spec: AttentionSpec, q_thd: Tensor, ctx: ForwardContext, sink_h: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend.attend_cached`; errors as those of `attend`."""
        if not _is_known(spec, ctx, sink_h):
            return self._plain_torch.attend_cached(spec, q_thd, ctx, sink_h)
        return self._attend(spec, q_thd, ctx, _cache(spec, ctx))

    def _write(self, spec: AttentionSpec, k_tgd: Tensor, v_tgd: Tensor, ctx: ForwardContext, cache: Tensor) -> None:
        slot_mapping_t = ctx.places(spec.layer).slot_mapping_t
        num_tokens = slot_mapping_t.shape[0]
        k, k_stride = _tokens("k", k_tgd, cache, spec.num_kv_heads, spec.head_dim, num_tokens)
        v, v_stride = _tokens("v", v_tgd, cache, spec.num_kv_heads, spec.head_dim, num_tokens)
        _core.cpu_write_kv(
            k=k.data_ptr(),
            k_stride=k_stride,
            v=v.data_ptr(),
            v_stride=v_stride,
            kv_cache=_address("kv_cache", cache, cache.dtype),
            dtype=DTYPES[cache.dtype],
            slot_mapping=_address("slot_mapping", slot_mapping_t, torch.int64),
            num_tokens=num_tokens,
            num_blocks=cache.shape[0],
            block_size=ctx.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )

    def _attend(self, spec: AttentionSpec, q_thd: Tensor, ctx: ForwardContext, cache: Tensor) -> Tensor:
        num_tokens = q_thd.shape[0]
        q, q_stride = _tokens("q", q_thd, cache, spec.num_heads, spec.head_dim, num_tokens)
        rows = min(ctx.row_slot_r.shape[0], ctx.kv_len_r.shape[0], ctx.query_start_r.shape[0] - 1)
        if ctx.num_rows > rows:
            raise ValueError(f"num_rows {ctx.num_rows} is more than the {rows} rows of row_slot, kv_len, query_start")
        table_sb = ctx.places(spec.layer).block_table_sb
        out = torch.empty(num_tokens, spec.num_heads, spec.head_dim, dtype=q_thd.dtype)
        _core.cpu_paged_attention(
            q=q.data_ptr(),
            q_stride=q_stride,
            kv_cache=_address("kv_cache", cache, cache.dtype),
            out=out.data_ptr(),
            dtype=DTYPES[cache.dtype],
            row_slot=_address("row_slot", ctx.row_slot_r, torch.int32),
            query_start=_address("query_start", ctx.query_start_r, torch.int32),
            kv_len=_address("kv_len", ctx.kv_len_r, torch.int32),
            block_table=_address("block_table", table_sb, torch.int32),
            num_rows=ctx.num_rows,
            num_tokens=num_tokens,
            num_slots=table_sb.shape[0],
            max_blocks_per_slot=table_sb.shape[1],
            num_blocks=cache.shape[0],
            block_size=ctx.block_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            num_threads=self.num_threads,
        )
        return out


def _is_known(spec: AttentionSpec, ctx: ForwardContext, sink_h: Tensor | None) -> bool:
    return spec.is_plain and sink_h is None and ctx.kv_cache[spec.layer].is_contiguous()


def _cache(spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
    """The layer's cache, if the kernels can read it."""
    cache = ctx.kv_cache[spec.layer]
    expected = (cache.shape[0], 2, spec.num_kv_heads, ctx.block_size, spec.head_dim)
    if cache.shape != expected or cache.dtype not in DTYPES:
        raise ValueError(f"kv_cache must be {expected} in one of {list(DTYPES)}, not {cache.shape} {cache.dtype}")
    return cache
