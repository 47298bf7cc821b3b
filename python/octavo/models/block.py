"""One block of a native decoder, made from a `BlockSpec`: norms and attention. Not here: its MLP (mlp.py), and what
lies around the blocks (decoder.py).

Shape suffixes: t tokens of the step, m model dim, o features of a product, h query heads, g KV heads, d head dim,
r rotary dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from octavo.attention.base import ForwardContext
from octavo.layers.attention import Attention
from octavo.layers.fused.base import BlockWeights
from octavo.layers.gated_delta import GatedDeltaMixer, GatedDeltaSpec
from octavo.layers.linear import Choices
from octavo.layers.moe import Merged, SparseMLP
from octavo.layers.norm import NoNorm, Norm, RMSNorm
from octavo.layers.parts import Parts
from octavo.layers.rotary import Rotary
from octavo.layers.state_space import StateSpaceMixer, StateSpaceSpec
from octavo.models.family import BlockSpec, Names, Temperature
from octavo.models.latent import LatentAttention
from octavo.models.mlp import GatedMLP, make_mlp, weights_of

if TYPE_CHECKING:
    from octavo.layers.fused.qkv_attention import QkvAttention


class SelfAttention(nn.Module):
    """q, k, v from one product, optional norms of q and k, rotation, paged attention, output product."""

    def __init__(self, spec: BlockSpec, names: Names, rotary: Rotary | None, parts: Parts) -> None:
        super().__init__()
        self.shape = spec.attention
        head_dim = self.shape.head_dim
        q_size, kv_size = self.shape.num_heads * head_dim, self.shape.num_kv_heads * head_dim
        self.sizes = [q_size, kv_size, kv_size]
        shards = {names.q: q_size, names.k: kv_size, names.v: kv_size}
        if names.qkv:
            shards = {names.qkv: sum(self.sizes)}
        self.has_gates = spec.has_gates
        if spec.has_gates:
            shards[names.gates] = q_size
        self.qkv = parts.linear(spec.hidden_size, shards, bias=spec.qkv_bias)
        self.o = parts.linear(q_size, {names.o: spec.hidden_size}, bias=spec.o_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.norms_all = spec.qk_norm == "all"
        if spec.qk_norm != "none":
            for name, size in ("q_norm", q_size), ("k_norm", kv_size):
                dim = size if self.norms_all else head_dim
                setattr(self, name, parts.norm(spec.qk_norm_spec or spec.norm, dim))
        self.norms_rotated, self.temperature = spec.norms_rotated, spec.temperature
        self.rotary = rotary
        sink_h = parts.parameter(self.shape.num_heads) if spec.has_sinks else None
        self.attention = Attention(spec.attention, sink_h)
        self.fused: QkvAttention | None = None

    def forward(self, hidden_tm: Tensor, cos_sin_tr: Tensor | None, ctx: ForwardContext) -> Tensor:
        """[t, m] -> [t, m]. `cos_sin` is None where nothing is rotated."""
        qkv_to = self.qkv(hidden_tm)
        gate_to: Tensor | None = None
        if self.has_gates:
            qkv_to, gate_to = qkv_to.split([sum(self.sizes), self.sizes[0]], dim=-1)
        if self.fused is not None and cos_sin_tr is not None:
            attended_to = self.fused(qkv_to, cos_sin_tr, ctx)
        else:
            attended_to = self._attend(qkv_to, cos_sin_tr, ctx)
        if gate_to is not None:
            attended_to = attended_to * gate_to.sigmoid()
        result_tm: Tensor = self.o(attended_to)
        return result_tm

    def _attend(self, qkv_to: Tensor, cos_sin_tr: Tensor | None, ctx: ForwardContext) -> Tensor:
        parts = torch.split(qkv_to, self.sizes, dim=-1)
        if self.norms_all and self.q_norm is not None and self.k_norm is not None:
            parts = self.q_norm(parts[0]), self.k_norm(parts[1]), parts[2]
        q_thd, k_tgd, v_tgd = (torch.unflatten(part_to, -1, (-1, self.shape.head_dim)) for part_to in parts)
        has_norms = not self.norms_all and self.q_norm is not None and self.k_norm is not None
        if has_norms and not self.norms_rotated:
            q_thd, k_tgd = self._normed(q_thd, k_tgd)
        if self.rotary is not None and cos_sin_tr is not None:
            q_thd, k_tgd = self.rotary(q_thd, k_tgd, cos_sin_tr)
        if has_norms and self.norms_rotated:
            q_thd, k_tgd = self._normed(q_thd, k_tgd)
        if self.temperature is not None:
            q_thd = self._grown(q_thd, ctx.position_t, self.temperature)
        out_thd: Tensor = self.attention(q_thd, k_tgd, v_tgd, ctx)
        return out_thd.flatten(1)

    def _normed(self, q_thd: Tensor, k_tgd: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(q_thd), self.k_norm(k_tgd)

    def _grown(self, q_thd: Tensor, position_t: Tensor, temperature: Temperature) -> Tensor:
        steps_t = torch.floor((position_t.float() + 1.0) / temperature.floor)
        return (q_thd * (torch.log1p(steps_t) * temperature.scale + 1.0)[:, None, None]).to(q_thd.dtype)

    def slots(self, names: Names) -> dict[str, Tensor]:
        """Checkpoint names below the layer's prefix."""
        found = {**self.qkv.slots(), **self.o.slots()}
        if self.q_norm is not None and self.k_norm is not None:
            found |= self.q_norm.slots(names.q_norm) | self.k_norm.slots(names.k_norm)
        if self.attention.sink_h is not None:
            found[names.sinks] = self.attention.sink_h
        return found


Mixer = SelfAttention | LatentAttention | StateSpaceMixer | GatedDeltaMixer


def make_mixer(spec: BlockSpec, names: Names, rotary: Rotary | None, parts: Parts) -> Mixer | None:
    """What brings a block's tokens together; None where nothing does."""
    if not spec.has_mixer:
        return None
    if spec.recurrent is not None and not spec.is_beside:
        return make_recurrent(spec, parts.below(names.recurrent))
    make = SelfAttention if spec.latent is None else LatentAttention
    return make(spec, names, rotary, parts)


def make_recurrent(spec: BlockSpec, parts: Parts) -> StateSpaceMixer | GatedDeltaMixer:
    """A block's recurrent layer."""
    layer = spec.attention.layer + spec.is_beside
    if isinstance(spec.recurrent, StateSpaceSpec):
        return StateSpaceMixer(spec.recurrent, layer, parts)
    assert isinstance(spec.recurrent, GatedDeltaSpec)
    return GatedDeltaMixer(spec.recurrent, layer, parts)


class DecoderBlock(nn.Module):
    """Attention (or a recurrent layer, or both) and an MLP between norms, or one of the two; each norm before them adds
    what came before it to the residual first."""

    def __init__(
        self,
        spec: BlockSpec,
        names: Names,
        rotary: Rotary | None,
        choose: Choices,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        of_mixer, of_mlp = (Parts(choice, dtype, device) for choice in choose)

        def norm(is_there: bool) -> Norm:
            return of_mixer.norm(spec.norm, spec.hidden_size) if is_there else NoNorm()

        self.names = names
        self.is_parallel, self.has_own_norm = spec.is_parallel, spec.has_own_norm
        self.residual_scale, self.norms_after = spec.residual_scale, spec.norms_after
        self.input_norm = norm(spec.norms_before and spec.has_mixer)
        self.attention = make_mixer(spec, names, rotary, of_mixer)
        self.beside = make_recurrent(spec, of_mixer.below(names.recurrent)) if spec.is_beside else None
        self.attention_out_norm = norm(spec.norms_after and spec.has_mixer)
        self.mlp_norm = norm(spec.norms_before and spec.has_mlp and (spec.has_own_norm or not spec.is_parallel))
        self.mlp = make_mlp(spec, names, of_mlp) if spec.has_mlp else None
        self.mlp_out_norm = norm(spec.norms_after and spec.has_mlp)

    def forward(
        self, hidden_tm: Tensor, residual_tm: Tensor | None, cos_sin_tr: Tensor | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """(MLP output, residual before it); the next norm adds them. `residual_tm` is None in the first block."""
        first_norm = self.mlp_norm if self.attention is None else self.input_norm
        if residual_tm is None:
            hidden_tm, residual_tm = first_norm(hidden_tm), hidden_tm
        else:
            hidden_tm, residual_tm = first_norm.add_norm(hidden_tm, residual_tm)
        if self.attention is None:
            return self._transformed(hidden_tm), residual_tm
        mixed_tm = self.attention(hidden_tm, cos_sin_tr, ctx)
        if self.beside is not None:
            mixed_tm = mixed_tm + self.beside(hidden_tm, None, ctx)
        attended_tm = self.attention_out_norm(mixed_tm)
        if self.mlp is None:
            return self._scaled(attended_tm), residual_tm
        if self.is_parallel:
            if self.has_own_norm:
                hidden_tm = self.mlp_norm(residual_tm)
            return self._scaled(attended_tm + self.mlp_out_norm(self.mlp(hidden_tm))), residual_tm
        hidden_tm, residual_tm = self.mlp_norm.add_norm(self._scaled(attended_tm), residual_tm)
        return self._transformed(hidden_tm), residual_tm

    def _transformed(self, hidden_tm: Tensor) -> Tensor:
        assert self.mlp is not None
        return self._scaled(self.mlp_out_norm(self.mlp(hidden_tm)))

    def _scaled(self, hidden_tm: Tensor) -> Tensor:
        return hidden_tm if self.residual_scale == 1.0 else hidden_tm * self.residual_scale

    def slots(self) -> dict[str, Tensor]:
        """Checkpoint names below the layer's prefix."""
        names = self.names
        attention = self.attention
        mixed = attention.slots(names) if isinstance(attention, SelfAttention | LatentAttention) else {}
        for recurrent in (attention, self.beside):
            if isinstance(recurrent, StateSpaceMixer | GatedDeltaMixer):
                mixed |= recurrent.slots()
        return {
            **mixed,
            **({} if self.mlp is None else self.mlp.slots()),
            **self.input_norm.slots(names.input_norm),
            **self.attention_out_norm.slots(names.attention_out_norm),
            **self.mlp_norm.slots(names.mlp_norm),
            **self.mlp_out_norm.slots(names.mlp_out_norm),
        }

    def merged_slots(self) -> dict[str, Merged]:
        """Tensors of a checkpoint that take the place of several."""
        return {} if self.mlp is None else self.mlp.merged_slots()

    def weights(self) -> BlockWeights:
        """The parameters of dense layers, by what they are for; of a block without `BlockSpec.extras`."""
        attention, input_norm, mlp_norm = self.attention, self.input_norm, self.mlp_norm
        assert isinstance(attention, SelfAttention)
        assert isinstance(input_norm, RMSNorm)
        assert isinstance(mlp_norm, RMSNorm)
        assert isinstance(self.mlp, GatedMLP | SparseMLP)
        q_gain_d, k_gain_d = (None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm))
        return BlockWeights(
            attention=attention.shape,
            norm_eps=input_norm.eps,
            input_gain_m=input_norm.weight,
            qkv=weights_of(attention.qkv),
            q_gain_d=q_gain_d,
            k_gain_d=k_gain_d,
            o=weights_of(attention.o),
            mlp_gain_m=mlp_norm.weight,
            sink_h=attention.attention.sink_h,
            mlp=self.mlp.weights(),
        )
