"""Runs launches without a GPU: Triton kernels in the interpreter, the Gluon one (which has none) as plain PyTorch that
reads and writes what the kernel would, partial sums and all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.reference.quantize_rows import dequantize_rows
from octavo.kernels.reference.skinny_linear import add_linear, gated_linear, linear
from octavo.kernels.reference.squares import dequantize_groups, dequantize_squares
from octavo.kernels.triton.launch import Launch


def run(launch: Launch) -> None:
    """Run one launch on CPU tensors."""
    if "x_desc" in launch.args:
        ring_gemm(launch.args, launch.constants)
    else:
        launch.run(pdl=False)


def ring_gemm(args: dict[str, Any], constants: dict[str, Any]) -> None:
    """What kernels/triton/ring_gemm.py computes."""
    rows, stride = args["num_rows"], constants["BLOCK_M"]
    x_mk, weight = args["x_desc"].base.float(), args["weight_desc"].base
    if constants["SHARE"]:
        groups = constants["K"] // constants["SIDE"]
        scale_gr = args["x_scale_m"][: groups * stride].view(groups, stride)[:, :rows]
        x_mk = dequantize_groups(x_mk, scale_gr)
        weight = dequantize_squares(weight, args["scale_n"], constants["SHARE"])
    elif constants["FP8"]:
        x_mk, weight = dequantize_rows(x_mk, args["x_scale_m"][:rows]), dequantize_rows(weight, args["scale_n"])
    assert x_mk.shape == (rows, constants["K"])
    partials = constants["PARTIALS"]
    bias = args["bias_n"] if constants["HAS_BIAS"] else None
    if partials:
        squares_m = by_partial(args["squares_in"], stride)[:partials, :rows].sum(0)
        x_mk = x_mk * torch.rsqrt(squares_m / constants["K"] + args["eps"])[:, None]
    if constants["EPILOGUE"] == "residual":
        residual = args["residual_mn"][:rows]
        residual.copy_(add_linear(residual, x_mk, weight, bias))
        args["gained_mn"][:rows] = (residual.float() * args["gain_n"].float()).to(residual.dtype)
        tiles = residual.float().square().unflatten(1, (-1, constants["BLOCK_N"])).sum(-1)
        by_partial(args["squares_out"], stride)[: tiles.shape[1], :rows] = tiles.T
        return
    product = gated_linear if constants["EPILOGUE"] == "silu" else linear
    args["y_mn"].copy_(product(x_mk, weight, bias))


def by_partial(squares_f: Tensor, stride: int) -> Tensor:
    """[partial, row]."""
    return squares_f[: squares_f.numel() // stride * stride].view(-1, stride)
