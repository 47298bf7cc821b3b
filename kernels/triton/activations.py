"""Device functions: the activations of MLPs, in fp32. No kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """By its name in reference/activations.py."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":  # x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if ACTIVATION == "relu2":
            y = y * y
    return y
