"""What invariant_gemm.py computes: a product in fp32, rounded once. That a row's result does not depend on the other
rows is for the kernel to show."""

from __future__ import annotations

import torch
from torch import Tensor


def invariant_product(x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [m, n] in `dtype`."""
    y_mn = x_mk.float() @ weight_nk.float().T
    return (y_mn if bias_n is None else y_mn + bias_n.float()).to(dtype)
