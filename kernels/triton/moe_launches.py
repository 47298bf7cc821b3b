"""The launches that a mixture of experts is made from (moe.py puts them in order): which arguments, constants and grid
each kernel of moe_route.py, moe_gemm.py and moe_gemv.py is started with.

Shape suffixes: m rows, h model dim, e experts, j choices, i inner dim, f flat pairs, s places, r rows of an input, n
and k features of a product's output and input.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton import moe_gemv, moe_table
from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.moe_experts import ROUTER_K, DecodeBuffers, Experts, InnerRows, Routing
from octavo.kernels.triton.moe_gemm import combine_kernel, expert_gemm
from octavo.kernels.triton.moe_route import (
    count_kernel,
    router_kernel,
    sort_kernel,
    top_k_kernel,
    top_k_rows_kernel,
)
from octavo.kernels.triton.moe_table import Tile, fit_rows
from octavo.kernels.triton.skinny_linear import ResidualStream
from octavo.kernels.triton.skinny_table import bucket_for
from octavo.kernels.triton.target import capability, is_amd, stages

ROUTER_M: Final = 16
TOP_K_ROWS: Final = 16
TOP_K_LOGITS: Final = 4096
"""Rows, and logits, of a program that chooses, at most."""
CHUNK: Final = 1024
"""Pairs that the sort looks at in one go; more are counted by a kernel of their own first."""
GROUP: Final = 8
"""Chunks that a program of the sort places."""
COMBINE_N: Final = 512
BARRIER_BYTES: Final = 1 << 10
"""What products need at most beside the tiles that are loaded ahead."""


def router(experts: Experts, x_mh: Tensor, logit_f: Tensor) -> Launch:
    """The router's product in parts of ROUTER_K columns."""
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


def top_k(
    experts: Experts,
    logit_f: Tensor,
    routing: Routing,
    stream: ResidualStream,
    num_rows: int,
    partials: int,
    eps: float,
    number_mh: Tensor | None,
) -> Launch:
    """Of the router's parts; rows come with `partials` sums of squares, and are quantized into `number_mh` if that is
    there."""
    parts = triton.cdiv(experts.width, ROUTER_K)
    args = {
        "logit_pme": logit_f,
        "bias_e": logit_f if experts.router_bias_e is None else experts.router_bias_e,
        "squares_f": stream.squares_f,
        "expert_mk": routing.expert_f,
        "weight_mk": routing.weight_f,
        "scale_m": routing.scale_m,
        "x_mk": stream.gained_mn,
        "number_mk": stream.gained_mn if number_mh is None else number_mh,
        "num_rows": num_rows,
        "eps": eps,
    }
    constants = {
        "WIDTH": experts.width,
        "WIDTH_P2": triton.next_power_of_2(experts.width),
        "EXPERTS": experts.num_experts,
        "EXPERTS_P2": triton.next_power_of_2(experts.num_experts),
        "TOP_K": experts.top_k,
        "RENORMALIZE": experts.renormalize,
        "BIASED": experts.router_bias_e is not None,
        "PARTS": parts,
        "PARTS_P2": triton.next_power_of_2(parts),
        "PARTIALS": partials,
        "PARTIALS_P2": triton.next_power_of_2(max(partials, 1)),
        "BUCKET": bucket_for(num_rows) if partials else 1,
        "QUANTIZE": number_mh is not None,
    }
    return Launch(top_k_kernel, (num_rows,), args, constants, _top_k_warps(experts.num_experts))


def top_k_rows(experts: Experts, logit_me: Tensor, routing: Routing, num_rows: int) -> Launch:
    """For rows that are normed, and their finished logits."""
    args = {
        "logit_me": logit_me,
        "expert_mk": routing.expert_f,
        "weight_mk": routing.weight_f,
        "num_rows": num_rows,
    }
    padded = triton.next_power_of_2(experts.num_experts)
    block_m = min(TOP_K_ROWS, TOP_K_LOGITS // padded)
    constants = {
        "EXPERTS": experts.num_experts,
        "EXPERTS_P2": padded,
        "TOP_K": experts.top_k,
        "RENORMALIZE": experts.renormalize,
        "BLOCK_M": block_m,
    }
    return Launch(top_k_rows_kernel, (triton.cdiv(num_rows, block_m),), args, constants, 4)


def _top_k_warps(num_experts: int) -> int:
    """So many that a thread compares at most 64 pairs of experts."""
    return max(1, triton.next_power_of_2(num_experts) ** 2 // (32 * 64))


def count(experts: Experts, routing: Routing, num_rows: int, counts: Tensor) -> Launch:
    """Pairs of each expert in each chunk."""
    args = {"expert_f": routing.expert_f, "count_pe": counts, "num_pairs": num_rows * experts.top_k}
    constants = {"EXPERTS": experts.num_experts, "BINS": _bins(experts), "CHUNK": CHUNK}
    return Launch(count_kernel, (counts.shape[0],), args, constants, 4)


def sort(
    experts: Experts, routing: Routing, num_rows: int, num_tiles: int, block_m: int, counts: Tensor | None
) -> Launch:
    """Pairs to places; `counts` is what `count` found, None: there is one chunk."""
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


def gate_up(
    experts: Experts,
    x_mh: Tensor,
    routing: Routing,
    inner: InnerRows,
    tile: Tile,
    num_tiles: int,
    *,
    is_scaled: bool,
) -> Launch:
    """Of rows by index (in e4m3 if the experts are), each still to be scaled if `is_scaled`."""
    args = {"x_rk": x_mh, "y_rn": inner.number_si, "y_scale_sg": inner.scale_f}
    constants = {
        "N": experts.inner,
        "K": experts.width,
        "FIRST": True,
        "GATED": experts.is_gated,
        "ACTIVATION": experts.activation,
        "SCALED": is_scaled,
        "LIMIT": experts.limit,
    }
    weight, bias = experts.gate_up_e2ih, experts.gate_up_bias_e2i
    scale = None if experts.scales is None else experts.scales.gate_up
    return _gemm(experts, weight, bias, scale, routing, tile, num_tiles, args, constants)


def down(experts: Experts, routing: Routing, inner: InnerRows, pair_fh: Tensor, tile: Tile, num_tiles: int) -> Launch:
    """Of places, to pairs."""
    args = {"x_rk": inner.number_si, "x_scale_sg": inner.scale_f, "y_rn": pair_fh}
    constants: dict[str, Any] = {"N": experts.width, "K": experts.inner, "FIRST": False, "GATED": False}
    constants |= {"ACTIVATION": "", "SCALED": False, "LIMIT": 0.0}
    weight, bias = experts.down_ehi, experts.down_bias_eh
    scale = None if experts.scales is None else experts.scales.down
    return _gemm(experts, weight, bias, scale, routing, tile, num_tiles, args, constants)


def _gemm(
    experts: Experts,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    routing: Routing,
    tile: Tile,
    num_tiles: int,
    args: dict[str, Any],
    constants: dict[str, Any],
) -> Launch:
    """One product; `args` and `constants` are what the two have of their own."""
    tma, k = has_tma(weight.device), constants["K"]

    def operand(matrix: Tensor, rows: int, *, by_tma: bool) -> Any:
        return TensorDescriptor(matrix, list(matrix.shape), [k, 1], [rows, tile.block_k]) if by_tma else matrix

    shared: dict[str, Any] = {
        "weight": operand(weight.view(-1, k), tile.block_n, by_tma=tma),
        "pair_s": routing.pair_s,
        "expert_t": routing.expert_t,
        "scale_m": routing.scale_m,
        "weight_f": routing.weight_f,
        "bias_n": weight if bias is None else bias,
        "weight_scale": routing.scale_m if scale is None else scale,
        "x_scale_sg": routing.scale_m,
        "y_scale_sg": routing.scale_m,
    }
    shared |= args
    shared["x_rk"] = operand(args["x_rk"], tile.block_m, by_tma=tma and not constants["FIRST"])
    constants = constants | {
        "TOP_K": experts.top_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SWAP_AB": tile.swap,
        "FP8": scale is not None,
        "W_BLOCK": experts.block,
        "BIASED": bias is not None,
        "SLOPE": experts.slope,
        "TMA": tma,
    }
    grid = constants["N"] // tile.block_n, num_tiles
    one_turn = tile.turn_bytes(2 if constants["GATED"] else 1, weight.element_size())
    num_stages = stages(tile.stages, one_turn, weight.device, BARRIER_BYTES)
    return Launch(expert_gemm, grid, shared, constants, tile.warps, num_stages)


def has_tma(device: torch.device) -> bool:
    """Whether weights come by the tensor memory accelerator (the interpreter has one too)."""
    found = capability(device)
    return not is_amd() and (found >= (9, 0) or (device.type != "cuda" and found == (0, 0)))


def combine(
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


def one_row(experts: Experts, stream: ResidualStream, buffers: DecodeBuffers, gain_n: Tensor) -> list[Launch]:
    """Both products of a single row."""
    width, inner, routing = experts.width, experts.inner, buffers.routing
    first, second = fit_rows(moe_table.GATE_UP_ROWS, inner, width), fit_rows(moe_table.DOWN_ROWS, width, inner)
    gate_up_scale = routing.scale_m if experts.scales is None else experts.scales.gate_up
    down_scale = routing.scale_m if experts.scales is None else experts.scales.down
    widening = {"FP8": experts.scales is not None, "W_BLOCK": experts.block}
    first_launch = Launch(
        moe_gemv.gate_up_kernel,
        (inner // first.block_n, experts.top_k),
        {
            "x_k": stream.gained_mn,
            "weight": experts.gate_up_e2ih,
            "expert_j": routing.expert_f,
            "scale_m": routing.scale_m,
            "weight_scale": gate_up_scale,
            "bias_n": routing.scale_m if experts.gate_up_bias_e2i is None else experts.gate_up_bias_e2i,
            "y_jn": buffers.one_ji,
        },
        {
            "N": inner,
            "K": width,
            "BLOCK_N": first.block_n,
            "BLOCK_K": first.block_k,
            "BIASED": experts.gate_up_bias_e2i is not None,
            "LIMIT": experts.limit,
            "SLOPE": experts.slope,
            **widening,
        },
        first.warps,
    )
    second_launch = Launch(
        moe_gemv.down_kernel,
        (width // second.block_n,),
        {
            "x_jk": buffers.one_ji,
            "weight": experts.down_ehi,
            "expert_j": routing.expert_f,
            "weight_j": routing.weight_f,
            "weight_scale": down_scale,
            "bias_n": routing.scale_m if experts.down_bias_eh is None else experts.down_bias_eh,
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
            "BIASED": experts.down_bias_eh is not None,
            **widening,
        },
        second.warps,
    )
    return [first_launch, second_launch]
