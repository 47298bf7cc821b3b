"""What invariant_heads.py computes: a product a head in fp32, rounded once. That a token's result does not depend on
the other tokens is for the kernel to show."""

from __future__ import annotations

import torch
from torch import Tensor


def invariant_heads(x_thk: Tensor, weight_hkn: Tensor, out_thn: Tensor) -> None:
    """y [t, h, n] into `out_thn`."""
    out_thn.copy_(torch.einsum("thk,hkn->thn", x_thk.float(), weight_hkn.float()))
