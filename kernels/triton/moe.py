"""A mixture of experts as launches: of a decode step on the residual stream, or of any number of normed rows.

Decode (at most MAX_ROWS rows, inputs and outputs as skinny_linear.py has them): router | top-k | sort | gate_up | down
| sum + residual; one row: router | top-k | gate_up | down + residual. Other rows: router logits from outside, then
top-k | [count] | sort | gate_up | down | sum. Nothing is read back, and grids depend on the number of rows only.

Shape suffixes: m rows, h model dim, e experts, j choices, i inner dim, f flat.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton import moe_gemv, moe_table
from octavo.kernels.triton.handles import only_compiling
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.moe_experts import ROUTER_K, DecodeBuffers, Experts, Routing
from octavo.kernels.triton.moe_gemm import combine_kernel, expert_gemm
from octavo.kernels.triton.moe_route import (
    count_kernel,
    router_kernel,
    sort_kernel,
    top_k_kernel,
    top_k_rows_kernel,
)
from octavo.kernels.triton.moe_table import PAIRS_PER_EXPERT, Tile, fit_rows
from octavo.kernels.triton.skinny_linear import ResidualStream
from octavo.kernels.triton.skinny_table import bucket_for
from octavo.kernels.triton.target import has_dependent_launches

ROUTER_M: Final = 16
TOP_K_ROWS: Final = 16
CHUNK: Final = 1024
"""Pairs that the sort looks at in one go; more are counted by a kernel of their own first."""
GROUP: Final = 8
"""Chunks that a program of the sort places."""
COMBINE_N: Final = 512
_compiled: set[tuple[Any, ...]] = set()


def num_partials(experts: Experts, num_rows: int) -> int:
    """Partial sums of squares a row that `decode` leaves on the stream."""
    if num_rows == 1:
        return experts.width // fit_rows(moe_table.DOWN_ROWS, experts.width, experts.inner).block_n
    return triton.cdiv(experts.width, COMBINE_N)


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
    squares a row come with the stream."""
    x_mh, routing = stream.gained_mn[:num_rows], buffers.routing
    router = _router(experts, x_mh, buffers.logit_f)
    parts = triton.cdiv(experts.width, ROUTER_K)
    top_k = _top_k(experts, buffers.logit_f, parts, routing, num_rows, stream.squares_f, partials, eps)
    if num_rows == 1:
        return [router, top_k, *_one_row(experts, stream, buffers, gain_n)]
    tiles = experts.tiles(bucket_for(num_rows))
    num_tiles = experts.num_tiles(num_rows, tiles["gate_up"].block_m)
    return [
        router,
        top_k,
        _sort(experts, routing, num_rows, num_tiles, tiles["gate_up"].block_m, None),
        _gate_up(experts, x_mh, routing, buffers.inner_to, tiles["gate_up"], num_tiles, is_scaled=True),
        _down(experts, routing, buffers.inner_to, buffers.pair_to, tiles["down"], num_tiles),
        _combine(experts, buffers.pair_to, num_rows, None, (stream, gain_n, bucket_for(num_rows))),
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
    ends = [int(most * num_experts / top_k) for most in PAIRS_PER_EXPERT] + [CHUNK // top_k]
    return sorted({1, *ends, *(end + 1 for end in ends)} - {0})


def _compile_all(experts: Experts, x_mh: Tensor, scores: Tensor | Chosen, pdl: bool) -> None:
    """Compile the kernels of any number of rows, once for experts of these sizes."""
    options = experts.limit, experts.slope, experts.down_bias_eh is not None, isinstance(scores, tuple)
    sizes = experts.num_experts, experts.top_k, experts.renormalize, experts.down_ehi.shape
    key = (*sizes, *options, x_mh.dtype, x_mh.device)
    if key in _compiled:
        return
    _compiled.add(key)
    for rows in kinds_of_steps(experts.num_experts, experts.top_k):
        x, *given = (t[:1].expand(rows, -1) for t in (x_mh, *(scores if isinstance(scores, tuple) else (scores,))))
        for launch in forward(experts, x, (given[0], given[1]) if len(given) == 2 else given[0], x_mh):
            launch.warm_up(pdl=pdl)


def forward(experts: Experts, x_mh: Tensor, scores: Tensor | Chosen, out_mh: Tensor) -> list[Launch]:
    """out = experts(x) for normed rows and their router logits, or what was chosen. Scratch is allocated here."""
    num_rows, dtype = x_mh.shape[0], x_mh.dtype
    tiles = experts.tiles(num_rows)
    block_m = tiles["gate_up"].block_m
    num_tiles = experts.num_tiles(num_rows, block_m)
    routing = Routing.allocate(experts, num_rows, num_tiles, block_m)
    inner_si = x_mh.new_empty(num_tiles * block_m, experts.inner, dtype=dtype)
    pair_fh = x_mh.new_empty(num_rows * experts.top_k, experts.width, dtype=dtype)
    if isinstance(scores, tuple):
        launches = []
        routing = replace(routing, expert_f=scores[0], weight_f=scores[1])
    else:
        launches = [_top_k_rows(experts, scores, routing, num_rows)]
    counts: Tensor | None = None
    chunks = triton.cdiv(num_rows * experts.top_k, CHUNK)
    if chunks > 1:
        counts = routing.expert_t.new_empty(chunks, experts.num_experts)
        launches.append(_count(experts, routing, num_rows, counts))
    return [
        *launches,
        _sort(experts, routing, num_rows, num_tiles, block_m, counts),
        _gate_up(experts, x_mh, routing, inner_si, tiles["gate_up"], num_tiles, is_scaled=False),
        _down(experts, routing, inner_si, pair_fh, tiles["down"], num_tiles),
        _combine(experts, pair_fh, num_rows, out_mh, None),
    ]


def _router(experts: Experts, x_mh: Tensor, logit_f: Tensor) -> Launch:
    num_rows = x_mh.shape[0]
    args = {"x_mk": x_mh, "router_ek": experts.router_eh, "logit_pme": logit_f, "num_rows": num_rows}
    constants = {
        "K": experts.width,
        "EXPERTS": experts.num_experts,
        "EXPERTS_P2": max(16, triton.next_power_of_2(experts.num_experts)),
        "BLOCK_M": ROUTER_M,
        "BLOCK_K": ROUTER_K,
    }
    grid = (triton.cdiv(experts.width, ROUTER_K), triton.cdiv(num_rows, ROUTER_M))
    return Launch(router_kernel, grid, args, constants, 8)


def _top_k(
    experts: Experts,
    logits: Tensor,
    parts: int,
    routing: Routing,
    num_rows: int,
    squares_f: Tensor,
    partials: int,
    eps: float,
) -> Launch:
    args = {
        "logit_pme": logits,
        "squares_f": squares_f,
        "expert_mk": routing.expert_f,
        "weight_mk": routing.weight_f,
        "scale_m": routing.scale_m,
        "num_rows": num_rows,
        "eps": eps,
    }
    constants = {
        "WIDTH": experts.width,
        "EXPERTS": experts.num_experts,
        "EXPERTS_P2": triton.next_power_of_2(experts.num_experts),
        "TOP_K": experts.top_k,
        "RENORMALIZE": experts.renormalize,
        "PARTS": parts,
        "PARTS_P2": triton.next_power_of_2(parts),
        "PARTIALS": partials,
        "PARTIALS_P2": triton.next_power_of_2(max(partials, 1)),
        "BUCKET": bucket_for(num_rows) if partials else 1,
    }
    return Launch(top_k_kernel, (num_rows,), args, constants, _top_k_warps(experts.num_experts))


def _top_k_rows(experts: Experts, logit_me: Tensor, routing: Routing, num_rows: int) -> Launch:
    """For rows that are normed, and their finished logits."""
    args = {
        "logit_me": logit_me,
        "expert_mk": routing.expert_f,
        "weight_mk": routing.weight_f,
        "num_rows": num_rows,
    }
    constants = {
        "EXPERTS": experts.num_experts,
        "EXPERTS_P2": triton.next_power_of_2(experts.num_experts),
        "TOP_K": experts.top_k,
        "RENORMALIZE": experts.renormalize,
        "BLOCK_M": TOP_K_ROWS,
    }
    return Launch(top_k_rows_kernel, (triton.cdiv(num_rows, TOP_K_ROWS),), args, constants, 4)


def _top_k_warps(num_experts: int) -> int:
    """So many that a thread compares at most 64 pairs of experts."""
    return max(1, triton.next_power_of_2(num_experts) ** 2 // (32 * 64))


def _count(experts: Experts, routing: Routing, num_rows: int, counts: Tensor) -> Launch:
    args = {"expert_f": routing.expert_f, "count_pe": counts, "num_pairs": num_rows * experts.top_k}
    constants = {"EXPERTS": experts.num_experts, "BINS": _bins(experts), "CHUNK": CHUNK}
    return Launch(count_kernel, (counts.shape[0],), args, constants, 4)


def _sort(
    experts: Experts, routing: Routing, num_rows: int, num_tiles: int, block_m: int, counts: Tensor | None
) -> Launch:
    args = {
        "expert_f": routing.expert_f,
        "count_pe": routing.expert_f if counts is None else counts,
        "pair_s": routing.pair_s,
        "expert_t": routing.expert_t,
        "num_pairs": num_rows * experts.top_k,
        "num_chunks": 0 if counts is None else counts.shape[0],
        "num_tiles": num_tiles,
    }
    constants = {
        "EXPERTS": experts.num_experts,
        "BINS": _bins(experts),
        "BLOCK_M": block_m,
        "CHUNK": CHUNK,
        "COUNTED": counts is not None,
        "GROUP": GROUP,
    }
    groups = 1 if counts is None else triton.cdiv(counts.shape[0], GROUP)
    return Launch(sort_kernel, (experts.num_experts, groups), args, constants, 4)


def _bins(experts: Experts) -> int:
    """A power of two with room for "no expert"."""
    return triton.next_power_of_2(experts.num_experts + 1)


def _gate_up(
    experts: Experts,
    x_mh: Tensor,
    routing: Routing,
    inner_si: Tensor,
    tile: Tile,
    num_tiles: int,
    *,
    is_scaled: bool,
) -> Launch:
    n, k, bias = experts.inner, experts.width, experts.gate_up_bias_e2i
    return _gemm(experts, experts.gate_up_e2ih, bias, x_mh, inner_si, n, k, routing, tile, num_tiles, is_scaled)


def _down(experts: Experts, routing: Routing, inner_si: Tensor, pair_fh: Tensor, tile: Tile, num_tiles: int) -> Launch:
    n, k, bias = experts.width, experts.inner, experts.down_bias_eh
    return _gemm(experts, experts.down_ehi, bias, inner_si, pair_fh, n, k, routing, tile, num_tiles, None)


def _gemm(
    experts: Experts,
    weight: Tensor,
    bias: Tensor | None,
    x_rk: Tensor,
    y_rn: Tensor,
    n: int,
    k: int,
    routing: Routing,
    tile: Tile,
    num_tiles: int,
    is_scaled: bool | None,
) -> Launch:
    """One product; `is_scaled` None: the second."""
    tma = has_tma(weight.device)
    flat = weight.view(-1, k)

    def operand(matrix: Tensor, rows: int, *, by_tma: bool) -> Any:
        return TensorDescriptor(matrix, list(matrix.shape), [k, 1], [rows, tile.block_k]) if by_tma else matrix

    args: dict[str, Any] = {
        "x_rk": operand(x_rk, tile.block_m, by_tma=tma and is_scaled is None),
        "weight": operand(flat, tile.block_n, by_tma=tma),
        "pair_s": routing.pair_s,
        "expert_t": routing.expert_t,
        "scale_m": routing.scale_m,
        "weight_f": routing.weight_f,
        "bias_n": weight if bias is None else bias,
        "y_rn": y_rn,
    }
    constants = {
        "N": n,
        "K": k,
        "TOP_K": experts.top_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GATED": is_scaled is not None,
        "SCALED": bool(is_scaled),
        "SWAP_AB": tile.swap,
        "BIASED": bias is not None,
        "LIMIT": experts.limit if is_scaled is not None else 0.0,
        "SLOPE": experts.slope,
        "TMA": tma,
    }
    return Launch(expert_gemm, (n // tile.block_n, num_tiles), args, constants, tile.warps, tile.stages)


def has_tma(device: torch.device) -> bool:
    """Whether weights come by the tensor memory accelerator (the interpreter has one too)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def _combine(
    experts: Experts,
    pair_fh: Tensor,
    num_rows: int,
    out_mh: Tensor | None,
    following: tuple[ResidualStream, Tensor, int] | None,
) -> Launch:
    """Into `out_mh`, or onto (stream, gain of the next norm, bucket)."""
    stream, gain_n, bucket = following or (None, pair_fh, 1)
    args = {
        "y_fn": pair_fh,
        "out_mn": pair_fh if out_mh is None else out_mh,
        "residual_mn": pair_fh if stream is None else stream.residual_mn,
        "gained_mn": pair_fh if stream is None else stream.gained_mn,
        "gain_n": gain_n,
        "squares_out": pair_fh if stream is None else stream.squares_f,
    }
    constants = {
        "N": experts.width,
        "TOP_K": experts.top_k,
        "BLOCK_N": COMBINE_N,
        "RESIDUAL": stream is not None,
        "BUCKET": bucket,
    }
    return Launch(combine_kernel, (triton.cdiv(experts.width, COMBINE_N), num_rows), args, constants, 4)


def _one_row(experts: Experts, stream: ResidualStream, buffers: DecodeBuffers, gain_n: Tensor) -> list[Launch]:
    width, inner, routing = experts.width, experts.inner, buffers.routing
    first, second = fit_rows(moe_table.GATE_UP_ROWS, inner, width), fit_rows(moe_table.DOWN_ROWS, width, inner)
    gate_up = Launch(
        moe_gemv.gate_up_kernel,
        (inner // first.block_n, experts.top_k),
        {
            "x_k": stream.gained_mn,
            "weight": experts.gate_up_e2ih,
            "expert_j": routing.expert_f,
            "scale_m": routing.scale_m,
            "y_jn": buffers.inner_to,
        },
        {"N": inner, "K": width, "BLOCK_N": first.block_n, "BLOCK_K": first.block_k},
        first.warps,
    )
    down = Launch(
        moe_gemv.down_kernel,
        (width // second.block_n,),
        {
            "x_jk": buffers.inner_to,
            "weight": experts.down_ehi,
            "expert_j": routing.expert_f,
            "weight_j": routing.weight_f,
            "residual_n": stream.residual_mn,
            "gained_n": stream.gained_mn,
            "gain_n": gain_n,
            "squares_out": stream.squares_f,
        },
        {
            "N": width,
            "K": inner,
            "TOP_K": experts.top_k,
            "TOP_K_P2": triton.next_power_of_2(experts.top_k),
            "BLOCK_N": second.block_n,
            "BLOCK_K": second.block_k,
        },
        second.warps,
    )
    return [gate_up, down]
