"""Multi-head latent attention (DeepSeek-V2, section 2.1), absorbed: the cache holds one latent a token and its rotated
part, which all heads share; queries are brought into the latents' space, and what is attended back out of it, by the
halves of the matrix that would make keys and values of latents.

Shape suffixes: t tokens of the step, m model dim, h heads, p plain dims of a query head, r rotated dims, l latent dim,
v value dims, d = l + r, o features of a product, k and n features of a head's product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from octavo.attention.base import ForwardContext
from octavo.layers.attention import Attention
from octavo.layers.linear import Linear
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.parts import Parts
from octavo.layers.rotary import Rotary
from octavo.models.family import BlockSpec, Names

if TYPE_CHECKING:
    from octavo.layers.fused.latent_write import LatentWrite


HeadProduct = Callable[[Tensor, Tensor, Tensor], None]
"""x [t, h, k] with a matrix a head [h, k, n] into [t, h, n]."""


def multiply_heads(x_thk: Tensor, weight_hkn: Tensor, out_thn: Tensor) -> None:
    """PyTorch's batched product."""
    torch.bmm(x_thk.transpose(0, 1), weight_hkn, out=out_thn.transpose(0, 1))


class LatentAttention(nn.Module):
    """q and latents from the hidden states, paged attention in the latents' space, output product."""

    def __init__(self, spec: BlockSpec, names: Names, rotary: Rotary | None, parts: Parts) -> None:
        super().__init__()
        assert spec.latent is not None
        self.sizes, self.rotary, heads = spec.latent, rotary, spec.attention.num_heads
        sizes = spec.latent
        q_size = heads * (sizes.plain_dim + sizes.rotated_dim)
        shards = {names.q_down: sizes.query_rank} if sizes.query_rank else {names.q: q_size}
        shards[names.kv_down] = sizes.rank + sizes.rotated_dim
        self.down = parts.linear(spec.hidden_size, shards)
        self.parts = [sizes.query_rank or q_size, sizes.rank, sizes.rotated_dim]
        self.q_norm: RMSNorm | LayerNorm | None = None
        self.q_up: Linear | None = None
        if sizes.query_rank:
            self.q_norm = parts.norm(sizes.norm, sizes.query_rank)
            self.q_up = parts.linear(sizes.query_rank, {names.q_up: q_size})
        self.latent_norm = parts.norm(sizes.norm, sizes.rank)
        self.kv_up = parts.parameter(heads, sizes.plain_dim + sizes.value_dim, sizes.rank)
        self.o = parts.linear(heads * sizes.value_dim, {names.o: spec.hidden_size})
        self.attention = Attention(spec.attention)
        self.fused: LatentWrite | None = None
        self.multiply: HeadProduct = multiply_heads

    def forward(self, hidden_tm: Tensor, cos_sin_tr: Tensor | None, ctx: ForwardContext) -> Tensor:
        """[t, m] -> [t, m]."""
        sizes = self.sizes
        query_to, latent_tl, rotated_tr = torch.split(self.down(hidden_tm), self.parts, dim=-1)
        if self.q_norm is not None and self.q_up is not None:
            query_to = self.q_up(self.q_norm(query_to))
        q_thd = torch.unflatten(query_to, -1, (-1, sizes.plain_dim + sizes.rotated_dim))
        q_thp, q_thr = torch.split(q_thd, [sizes.plain_dim, sizes.rotated_dim], dim=-1)
        tokens, heads = q_thd.shape[:2]
        absorbed_thd = q_thd.new_empty(tokens, heads, sizes.rank + sizes.rotated_dim)
        self.multiply(q_thp, self.kv_up[:, : sizes.plain_dim], absorbed_thd[..., : sizes.rank])
        if self.fused is not None and cos_sin_tr is not None:
            self.fused(q_thr, latent_tl, rotated_tr, cos_sin_tr, absorbed_thd, ctx)
            attended_thl = self.attention.attend_cached(absorbed_thd, ctx)
        else:
            attended_thl = self._attend(absorbed_thd, q_thr, latent_tl, rotated_tr, cos_sin_tr, ctx)
        out_thv = q_thd.new_empty(tokens, heads, sizes.value_dim)
        self.multiply(attended_thl, self.kv_up[:, sizes.plain_dim :].transpose(1, 2), out_thv)
        result_tm: Tensor = self.o(out_thv.flatten(1))
        return result_tm

    def _attend(
        self,
        absorbed_thd: Tensor,
        q_thr: Tensor,
        latent_tl: Tensor,
        rotated_tr: Tensor,
        cos_sin_tr: Tensor | None,
        ctx: ForwardContext,
    ) -> Tensor:
        k_t1r = rotated_tr.unsqueeze(1)
        if self.rotary is not None and cos_sin_tr is not None:
            q_thr, k_t1r = self.rotary(q_thr, k_t1r, cos_sin_tr)
        absorbed_thd[..., self.sizes.rank :] = q_thr
        k_t1d = torch.cat((self.latent_norm(latent_tl).unsqueeze(1), k_t1r), dim=-1)
        attended_thl: Tensor = self.attention(absorbed_thd, k_t1d, k_t1d, ctx)
        return attended_thl

    def use_fused(self, *, pdl: bool) -> None:
        """From now on run what lies between the products and attention with one kernel."""
        from octavo.layers.fused.latent_write import LatentWrite  # loads Triton

        if self.rotary is not None and isinstance(self.latent_norm, RMSNorm):
            self.fused = LatentWrite(self.attention, self.latent_norm, self.rotary, pdl=pdl)

    def slots(self, names: Names) -> dict[str, Tensor]:
        """Checkpoint names below the layer's prefix."""
        found = {**self.down.slots(), **self.latent_norm.slots(names.kv_latent_norm), **self.o.slots()}
        found[f"{names.kv_up}.weight"] = self.kv_up.flatten(0, 1)
        if self.q_norm is not None and self.q_up is not None:
            found |= self.q_norm.slots(names.q_latent_norm) | self.q_up.slots()
        return found
