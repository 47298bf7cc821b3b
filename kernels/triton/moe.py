"""A mixture of experts: the launches of a decode step on the residual stream, or of any number of normed rows.

Decode (at most MAX_ROWS rows, inputs and outputs as skinny_linear.py has them): router | top-k | sort | gate_up | down
| sum + residual; one row: router | top-k | gate_up | down + residual. Other rows: router logits from outside, then
top-k | [count] | sort | [rows to e4m3] | gate_up | down | sum. Experts in e4m3 have rows in e4m3 too, but for a decode
step of one row; in others top-k quantizes them. Nothing is read back, and grids depend on the number of rows only. The
launches themselves: moe_launches.py.

Shape suffixes: m rows, h model dim, e experts, j choices, i inner dim, f flat.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.kernels.triton import moe_experts, moe_launches, moe_table
from octavo.kernels.triton.handles import only_compiling
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.moe_experts import DecodeBuffers, Experts, InnerRows, Routing
from octavo.kernels.triton.moe_table import PAIRS_PER_EXPERT, fit_rows
from octavo.kernels.triton.quantize_rows import quantize_launch
from octavo.kernels.triton.skinny_linear import ResidualStream
from octavo.kernels.triton.skinny_table import bucket_for
from octavo.kernels.triton.target import has_dependent_launches

_compiled: set[tuple[Any, ...]] = set()


def num_partials(experts: Experts, num_rows: int) -> int:
    """Partial sums of squares a row that `decode` leaves on the stream."""
    if num_rows == 1:
        return experts.width // fit_rows(moe_table.DOWN_ROWS, experts.width, experts.inner).block_n
    return triton.cdiv(experts.width, moe_launches.COMBINE_N)


def decode(
    experts: Experts,
    stream: ResidualStream,
    buffers: DecodeBuffers,
    num_rows: int,
    *,
    partials: int,
    gain_n: Tensor,
    eps: float,
) -> list[Launch]:
    """residual += experts(norm(residual)), and the next norm's inputs with its gain `gain_n`; `partials` sums of
    squares a row come with the stream. Experts are gated by silu or clamped (`Experts.limit`)."""
    assert experts.is_gated, "the kernel of one row knows gated experts only"
    assert experts.activation == "silu", "and this activation"
    x_mh, routing = stream.gained_mn[:num_rows], buffers.routing
    number_mh = None if experts.scales is None or num_rows == 1 else buffers.number_mh[:num_rows]
    found = [
        moe_launches.router(experts, x_mh, buffers.logit_f),
        moe_launches.top_k(experts, buffers.logit_f, routing, stream, num_rows, partials, eps, number_mh),
    ]
    if num_rows == 1:
        return [*found, *moe_launches.one_row(experts, stream, buffers, gain_n)]
    tiles = experts.tiles(bucket_for(num_rows))
    block_m = tiles["gate_up"].block_m
    num_tiles = experts.num_tiles(num_rows, block_m)
    rows_mh = x_mh if number_mh is None else number_mh
    inner, pair_fh = buffers.inner, buffers.pair_fh
    return [
        *found,
        moe_launches.sort(experts, routing, num_rows, num_tiles, block_m, None),
        moe_launches.gate_up(experts, rows_mh, routing, inner, tiles["gate_up"], num_tiles, is_scaled=True),
        moe_launches.down(experts, routing, inner, pair_fh, tiles["down"], num_tiles),
        moe_launches.combine(experts, pair_fh, num_rows, None, (stream, gain_n, bucket_for(num_rows))),
    ]


Chosen = tuple[Tensor, Tensor]
"""(experts int32 [m, j], their weights fp32 [m, j]) of rows that were routed already; both contiguous."""


def mix(experts: Experts, x_mh: Tensor, scores: Tensor | Chosen) -> Tensor:
    """The experts' weighted sum [m, h] for normed rows and their router logits (or what was chosen by them), on CUDA;
    no host synchronization. The sizes must be ones that moe_table.py `supports`."""
    out_mh = torch.empty_like(x_mh)
    pdl = has_dependent_launches(x_mh.device)
    if only_compiling():
        _compile_all(experts, x_mh, scores, pdl)
        return out_mh
    for launch in forward(experts, x_mh, scores, out_mh):
        launch.run(pdl=pdl)
    return out_mh


def kinds_of_steps(num_experts: int, top_k: int) -> list[int]:
    """Numbers of rows, one at least for every set of kernels that `forward` can launch."""
    ends = [int(most * num_experts / top_k) for most in PAIRS_PER_EXPERT] + [moe_launches.CHUNK // top_k]
    return sorted({1, *ends, *(end + 1 for end in ends)} - {0})


def _compile_all(experts: Experts, x_mh: Tensor, scores: Tensor | Chosen, pdl: bool) -> None:
    """Compile the kernels of any number of rows, once for experts of these sizes."""
    kind = experts.is_gated, experts.activation, experts.limit, experts.slope
    options = (*kind, experts.down_bias_eh is not None, isinstance(scores, tuple))
    sizes = experts.num_experts, experts.top_k, experts.renormalize, experts.block, experts.down_ehi.shape
    key = (*sizes, *options, experts.down_ehi.dtype, x_mh.dtype, x_mh.device)
    if key in _compiled:
        return
    _compiled.add(key)
    for rows in kinds_of_steps(experts.num_experts, experts.top_k):
        x, *given = (
            t.new_empty(rows, t.shape[1]) for t in (x_mh, *(scores if isinstance(scores, tuple) else (scores,)))
        )
        for launch in forward(experts, x, (given[0], given[1]) if len(given) == 2 else given[0], x_mh):
            launch.warm_up(pdl=pdl)


def forward(experts: Experts, x_mh: Tensor, scores: Tensor | Chosen, out_mh: Tensor) -> list[Launch]:
    """out = experts(x) for normed rows and their router logits, or what was chosen. Scratch is allocated here."""
    num_rows = x_mh.shape[0]
    tiles = experts.tiles(num_rows)
    block_m = tiles["gate_up"].block_m
    num_tiles = experts.num_tiles(num_rows, block_m)
    routing = Routing.allocate(experts, num_rows, num_tiles, block_m)
    groups = experts.inner // tiles["gate_up"].block_n
    inner = InnerRows.allocate(experts, num_tiles * block_m, groups, x_mh.dtype)
    pair_fh = x_mh.new_empty(num_rows * experts.top_k, experts.width)
    found: list[Launch] = []
    if isinstance(scores, tuple):
        routing = replace(routing, expert_f=scores[0], weight_f=scores[1])
    else:
        found.append(moe_launches.top_k_rows(experts, scores, routing, num_rows))
    counts: Tensor | None = None
    chunks = triton.cdiv(num_rows * experts.top_k, moe_launches.CHUNK)
    if chunks > 1:
        counts = routing.expert_t.new_empty(chunks, experts.num_experts)
        found.append(moe_launches.count(experts, routing, num_rows, counts))
    found.append(moe_launches.sort(experts, routing, num_rows, num_tiles, block_m, counts))
    is_fp8, rows_mh = experts.scales is not None, x_mh
    if is_fp8:
        rows_mh = torch.empty_like(x_mh, dtype=moe_experts.ROW_NUMBERS)
        found.append(quantize_launch(x_mh, rows_mh, routing.scale_m))
    return [
        *found,
        moe_launches.gate_up(experts, rows_mh, routing, inner, tiles["gate_up"], num_tiles, is_scaled=is_fp8),
        moe_launches.down(experts, routing, inner, pair_fh, tiles["down"], num_tiles),
        moe_launches.combine(experts, pair_fh, num_rows, out_mh, None),
    ]
