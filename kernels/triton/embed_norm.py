"""The ends of the residual stream (skinny_linear.py): token embedding with the first norm's inputs, and the final norm.

Shape suffixes: t rows (one token each), v vocabulary, h model dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.launch import Launch
from octavo.kernels.triton.skinny_linear import ResidualStream


@triton.jit
def embed_kernel(
    token_id_t,
    table_vh,
    gain_h,
    residual_th,
    gained_th,
    squares_out,
    H: tl.constexpr,
    H_P2: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    h = tl.arange(0, H_P2)
    inside = h < H
    gain = tl.load(gain_h + h, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(token_id_t + row).to(tl.int64)
    vector = tl.load(table_vh + token * H + h, mask=inside, other=0.0)
    x = vector.to(tl.float32)
    tl.store(residual_th + row * H + h, vector, mask=inside)
    tl.store(gained_th + row * H + h, (x * gain).to(gained_th.dtype.element_ty), mask=inside)
    tl.store(squares_out + row, tl.sum(x * x, 0))


@triton.jit
def final_norm_kernel(residual_th, gain_h, out_th, eps, H: tl.constexpr, H_P2: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    h = tl.arange(0, H_P2)
    inside = h < H
    gain = tl.load(gain_h + h, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(residual_th + row * H + h, mask=inside, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / H + eps)).to(out_th.dtype.element_ty)
    tl.store(out_th + row * H + h, (normed.to(tl.float32) * gain).to(out_th.dtype.element_ty), mask=inside)


def embed(token_id_t: Tensor, table_vh: Tensor, gain_h: Tensor, stream: ResidualStream) -> Launch:
    """residual = table[token], and the first norm's inputs (one partial sum of squares a row)."""
    width = table_vh.shape[1]
    args = {
        "token_id_t": token_id_t,
        "table_vh": table_vh,
        "gain_h": gain_h,
        "residual_th": stream.residual_mn,
        "gained_th": stream.gained_mn,
        "squares_out": stream.squares_f,
    }
    return Launch(embed_kernel, (token_id_t.shape[0],), args, _width(width), _warps(width))


def final_norm(stream: ResidualStream, gain_h: Tensor, eps: float, out_th: Tensor) -> Launch:
    """out = residual / rms * gain, rounded before the gain as layers/norm.py does."""
    width = out_th.shape[1]
    args = {"residual_th": stream.residual_mn, "gain_h": gain_h, "out_th": out_th, "eps": eps}
    return Launch(final_norm_kernel, (out_th.shape[0],), args, _width(width), _warps(width))


def _width(width: int) -> dict[str, int]:
    return {"H": width, "H_P2": triton.next_power_of_2(width)}


def _warps(width: int) -> int:
    return 8 if width > 2048 else 4
