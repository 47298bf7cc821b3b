"""Norm, rotation and cache write of latent attention by one kernel; takes the place of torch ops in the layer
(models/latent.py).

Shape suffixes: t tokens, h heads, r rotated dims, l latent dim, d = l + r.
"""

from __future__ import annotations

from torch import Tensor

from octavo.attention.base import ForwardContext
from octavo.kernels.triton.latent_write import latent_write
from octavo.layers.attention import Attention
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import Rotary


class LatentWrite:
    """One layer's kernel."""

    def __init__(self, attention: Attention, norm: RMSNorm, rotary: Rotary, *, pdl: bool) -> None:
        self._layer, self._norm, self._pdl = attention.spec.layer, norm, pdl
        self._is_interleaved = rotary.spec.is_interleaved

    def __call__(
        self,
        query_thr: Tensor,
        latent_tl: Tensor,
        key_tr: Tensor,
        cos_sin_tr: Tensor,
        q_thd: Tensor,
        ctx: ForwardContext,
    ) -> None:
        """The rotated part of `q_thd`, and the token's place in the cache."""
        latent_write(
            query_thr,
            latent_tl,
            key_tr,
            cos_sin_tr,
            self._norm.weight,
            ctx.kv_cache[self._layer],
            ctx.places(self._layer).slot_mapping_t,
            q_thd,
            eps=self._norm.eps,
            is_interleaved=self._is_interleaved,
            pdl=self._pdl,
        )
