"""Batch-invariant execution (`--deterministic`): a token's numbers do not depend on what else is in its step, nor on
how its prompt was cut into chunks. Every product sums over k in one fixed order (kernels/triton/invariant_gemm.py and
invariant_heads.py);
norms, activations and rotations work row by row anyway, and so do mixtures of experts by their kernels but for the
router's product; attention is the backend's part (attention/triton.py).

Shape suffixes: t tokens, i input features, o output features, s sampled rows, v vocabulary, m model dim, e experts,
h heads, k and n features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers.linear import Dense, Linear, Product


class Invariant(Dense):
    """Weights as `Dense` keeps them; on CUDA their products are batch-invariant."""

    def apply(self, layer: Linear, x_ti: Tensor) -> Tensor:
        """See `LinearMethod.apply`."""
        from octavo.kernels.triton.invariant_gemm import invariant_product  # loads Triton

        return invariant_product(x_ti, layer.weight, layer.bias, layer.dtype)


INVARIANT = Invariant()


def invariant(layer: Product) -> Invariant:
    """The choice of `Invariant` for every layer."""
    return INVARIANT


def invariant_scores(hidden_tm: Tensor, router_em: Tensor) -> Tensor:
    """A router's logits [t, e] in its dtype."""
    from octavo.kernels.triton.invariant_gemm import invariant_product  # loads Triton

    return invariant_product(hidden_tm, router_em, None, router_em.dtype)


def invariant_heads(x_thk: Tensor, weight_hkn: Tensor, out_thn: Tensor) -> None:
    """Products of heads with matrices of their own, as `models.latent.multiply_heads`."""
    from octavo.kernels.triton.invariant_heads import invariant_heads as multiply  # loads Triton

    multiply(x_thk, weight_hkn, out_thn)


def invariant_logits(hidden_sm: Tensor, weight_vm: Tensor) -> Tensor:
    """Logits fp32 [s, v], as `layers.embedding.project`."""
    from octavo.kernels.triton.invariant_gemm import invariant_product  # loads Triton

    return invariant_product(hidden_sm, weight_vm, None, torch.float32)
