"""The CPU's attention kernel against torch's SDPA: `python benches/cpu_attention.py [--threads N] [--json out.json]`.

SmolLM2's layer (9 query heads, 3 KV heads, head dim 64). Ours reads the paged cache and includes the KV write; SDPA
gets dense K and V ready made. Medians; decoding is bound by memory, so the rate of reading K and V is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from octavo._core import cpu_features
from octavo.attention.base import AttentionSpec, ForwardContext
from octavo.attention.cpu import CpuAttention

HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16
SHAPES = [(64, 1, 512), (8, 1, 512), (1, 1, 4096), (1, 2048, 2048)]
"""(rows, queries of a row, kv length)"""


@dataclass
class Result:
    dtype: str
    rows: int
    queries: int
    kv_len: int
    ours_ms: float
    sdpa_ms: float
    gb_per_s: float
    gflops: float


def median_ms(call: Callable[[], object], repeats: int = 21) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def make_context(rows: int, queries: int, kv_len: int, dtype: torch.dtype) -> ForwardContext:
    """Rows of one length over shuffled blocks."""
    width = -(-kv_len // BLOCK)
    table = (torch.randperm(rows * width) + 1).int().reshape(rows, width)
    position = torch.arange(kv_len - queries, kv_len).repeat(rows)
    row = torch.arange(rows).repeat_interleave(queries)
    places = table[row, position // BLOCK].long() * BLOCK + position % BLOCK
    return ForwardContext(
        kv_cache=[torch.randn(1 + rows * width, 2, KV_HEADS, BLOCK, DIM, dtype=dtype)],
        block_table_sb=table,
        row_slot_r=torch.arange(rows, dtype=torch.int32),
        query_start_r=torch.arange(rows + 1, dtype=torch.int32) * queries,
        kv_len_r=torch.full((rows,), kv_len, dtype=torch.int32),
        position_t=position,
        slot_mapping_t=places,
        block_size=BLOCK,
        num_rows=rows,
        num_decode_rows=rows if queries == 1 else 0,
        num_tokens=rows * queries,
        max_query_len=queries,
        max_kv_len=kv_len,
    )


def measure(rows: int, queries: int, kv_len: int, dtype: torch.dtype, threads: int) -> Result:
    ctx = make_context(rows, queries, kv_len, dtype)
    spec = AttentionSpec(0, HEADS, KV_HEADS, DIM, DIM**-0.5)
    q, k, v = (torch.randn(rows * queries, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    backend = CpuAttention(threads)
    ours = median_ms(lambda: backend.attend(spec, q, k, v, ctx))
    dense_q = torch.randn(rows, HEADS, queries, DIM, dtype=dtype)
    dense_k, dense_v = (torch.randn(rows, KV_HEADS, kv_len, DIM, dtype=dtype) for _ in range(2))
    causal = queries > 1
    sdpa = median_ms(lambda: scaled_dot_product_attention(dense_q, dense_k, dense_v, is_causal=causal, enable_gqa=True))
    pairs = rows * (kv_len * queries - queries * (queries - 1) // 2)
    read = rows * kv_len * KV_HEADS * DIM * 2 * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return Result(name, rows, queries, kv_len, ours, sdpa, read / ours / 1e6, pairs * HEADS * DIM * 4 / ours / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{cpu_features()[0]}, {options.threads} threads")
    results = [measure(*shape, dtype, options.threads) for dtype in (torch.float32, torch.bfloat16) for shape in SHAPES]
    for r in results:
        print(
            f"{r.dtype:9s} {r.rows:3d} rows x {r.queries:4d} queries x {r.kv_len:4d} kv: {r.ours_ms:8.3f} ms,"
            f" SDPA {r.sdpa_ms:8.3f} ms ({r.sdpa_ms / r.ours_ms:.1f}x), {r.gb_per_s:5.1f} GB/s, {r.gflops:5.0f} GFLOP/s"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1))


if __name__ == "__main__":
    main()
