"""What the sampling kernels share: a row's values, and what each weighs. Device functions only (sample.py describes the
launches, sample_limits.py those that find what top-k and top-p keep).

Shape suffixes: v tokens of a chunk, c chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

ARENA = ["slot_ptr", "position_ptr", "out_ptr"]
"""Pointers into arrays of the caller's, anywhere."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
WEIGHT = tl.constexpr(1099511627776.0)


@triton.jit
def clean(logits_ptr, row, row_stride, id_v, vocab_size):
    """Logits, without NaN and +inf."""
    x_v = tl.load(logits_ptr + row.to(tl.int64) * row_stride + id_v, mask=id_v < vocab_size, other=-float("inf"))
    return tl.where(x_v == x_v, tl.minimum(x_v, 1e30), -float("inf"))


@triton.jit
def scaled(logits_ptr, row, row_stride, id_v, vocab_size, divisor):
    """Clean logits over the temperature; zeros have no sign."""
    x_v = tl.div_rn(clean(logits_ptr, row, row_stride, id_v, vocab_size), divisor)
    return tl.where(x_v == 0.0, 0.0, x_v)


@triton.jit
def weigh(x_v, top):
    """int64: floor(exp(x - top) * 2^40)."""
    return (tl.exp(x_v - tl.maximum(top, LOWEST)) * WEIGHT).to(tl.int64)


@triton.jit
def ordered(x_v):
    """int32 keys in the order of the values."""
    bits_v = x_v.to(tl.int32, bitcast=True)
    return tl.where(bits_v < 0, bits_v ^ 0x7FFFFFFF, bits_v)


@triton.jit
def top_of(value_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    """A row's largest value."""
    chunk_c = tl.arange(0, CHUNKS)
    return tl.max(tl.load(value_ptr + row * num_chunks + chunk_c, mask=chunk_c < num_chunks, other=-float("inf")), 0)


@triton.jit
def join(PDL: tl.constexpr):
    """Wait for the kernel before, let the next one start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
