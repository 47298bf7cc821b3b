"""The decoder that the native families share: one block, configured by data (`BlockSpec`), and the model around it.

The modules here run every step on every device. Where `octavo.layers.fused` supports the decoder, its kernels run the
decode steps instead, from the same parameters.

A family (llama.py, qwen3.py …) is a `Family`: the checkpoint's names, and a function from config to `BlockSpec`.
Pre-norm blocks with rotary attention and a gated MLP; other shapes go through transformers_backend.py.

Shape suffixes: t tokens of the step, s sampled rows, m model dim, h query heads, g KV heads, d head dim, r rotary dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from octavo.attention.base import AttentionBackend, AttentionSpec, ForwardContext
from octavo.errors import ModelError
from octavo.layers.activation import GatedActivation
from octavo.layers.attention import Attention, set_backend
from octavo.layers.embedding import Embedding
from octavo.layers.fused.base import BlockWeights, DecodeKernels, DecoderWeights, GatedWeights, Weights
from octavo.layers.fused.support import DecoderShape, DeviceTraits, obstacle
from octavo.layers.invariant import invariant_logits, invariant_scores
from octavo.layers.linear import Choice, Linear, dense
from octavo.layers.moe import ExpertNames, ExpertsSpec, Merged, SparseMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.quant.fp8_tensors import as_kept
from octavo.layers.rotary import Rotary
from octavo.models.config import NormalConfig
from octavo.models.description import rotary_spec
from octavo.models.weights import finish_linears, linears_of, load_strict

if TYPE_CHECKING:
    from octavo.layers.fused.qkv_attention import QkvAttention


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One decoder block: sizes and options."""

    hidden_size: int
    intermediate_size: int
    attention: AttentionSpec
    norm_eps: float
    hidden_act: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and of k, before the rotation."""
    experts: ExpertsSpec | None = None
    """The MLP is a mixture of such experts."""


@dataclass(frozen=True, slots=True)
class Names:
    """What a checkpoint calls the parts; `layer` is a prefix with {i}, the parts of a block come below it."""

    embed: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{i}"
    input_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    experts: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: where its tensors are, and what its blocks are."""

    names: Names
    block: Callable[[NormalConfig, int], BlockSpec]
    """(config, layer index) -> the layer's block."""


def block_spec(
    config: NormalConfig,
    layer: int,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> BlockSpec:
    """A block with the config's sizes, window and scale 1 / sqrt(head_dim)."""
    attention = AttentionSpec(
        layer=layer,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=config.layer_windows[layer],
    )
    return BlockSpec(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        attention=attention,
        norm_eps=config.norm_eps,
        hidden_act=config.hidden_act,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        experts=experts_spec(config, layer),
    )


def experts_spec(config: NormalConfig, layer: int) -> ExpertsSpec | None:
    """The layer's mixture of experts; None: it has a plain MLP."""
    experts = config.experts
    if experts is None or not experts.is_sparse[layer]:
        return None
    return ExpertsSpec(experts.num_experts, experts.top_k, experts.intermediate_size, experts.renormalize)


class SelfAttention(nn.Module):
    """q, k, v from one product, optional head norms, rotation, paged attention, output product."""

    def __init__(
        self,
        spec: BlockSpec,
        names: Names,
        rotary: Rotary,
        choose: Choice,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.shape = spec.attention
        head_dim = self.shape.head_dim
        q_size, kv_size = self.shape.num_heads * head_dim, self.shape.num_kv_heads * head_dim
        shards = {names.q: q_size, names.k: kv_size, names.v: kv_size}
        self.qkv = Linear(spec.hidden_size, shards, bias=spec.qkv_bias, dtype=dtype, device=device, choose=choose)
        self.o = Linear(
            q_size, {names.o: spec.hidden_size}, bias=spec.o_bias, dtype=dtype, device=device, choose=choose
        )
        self.q_norm = RMSNorm(head_dim, spec.norm_eps, dtype=dtype, device=device) if spec.qk_norm else None
        self.k_norm = RMSNorm(head_dim, spec.norm_eps, dtype=dtype, device=device) if spec.qk_norm else None
        self.rotary = rotary
        self.attention = Attention(spec.attention)
        self.fused: QkvAttention | None = None

    def forward(self, hidden_tm: Tensor, cos_sin_tr: Tensor, ctx: ForwardContext) -> Tensor:
        """[t, m] -> [t, m]."""
        qkv_to = self.qkv(hidden_tm)
        attend = self.fused or self._attend
        result_tm: Tensor = self.o(attend(qkv_to, cos_sin_tr, ctx))
        return result_tm

    def _attend(self, qkv_to: Tensor, cos_sin_tr: Tensor, ctx: ForwardContext) -> Tensor:
        heads, groups = self.shape.num_heads, self.shape.num_kv_heads
        qkv = qkv_to.view(-1, heads + 2 * groups, self.shape.head_dim)
        q_thd, k_tgd, v_tgd = torch.split(qkv, [heads, groups, groups], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_thd, k_tgd = self.q_norm(q_thd), self.k_norm(k_tgd)
        q_thd, k_tgd = self.rotary(q_thd, k_tgd, cos_sin_tr)
        out_thd: Tensor = self.attention(q_thd, k_tgd, v_tgd, ctx)
        return out_thd.flatten(1)


class GatedMLP(nn.Module):
    """down(act(gate) * up), gate and up from one product."""

    def __init__(self, spec: BlockSpec, names: Names, choose: Choice, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        inner, outer = spec.intermediate_size, spec.hidden_size
        self.gate_up = Linear(
            outer, {names.gate: inner, names.up: inner}, bias=spec.mlp_bias, dtype=dtype, device=device, choose=choose
        )
        self.act = GatedActivation(spec.hidden_act)
        self.down = Linear(inner, {names.down: outer}, bias=spec.mlp_bias, dtype=dtype, device=device, choose=choose)

    def forward(self, hidden_tm: Tensor) -> Tensor:
        """[t, m] -> [t, m]."""
        result_tm: Tensor = self.down(self.act(self.gate_up(hidden_tm)))
        return result_tm

    def slots(self) -> dict[str, Tensor]:
        """Checkpoint names below the layer's prefix."""
        return {**self.gate_up.slots(), **self.down.slots()}

    def merged_slots(self) -> dict[str, Merged]:
        """No tensor of a checkpoint takes the place of several."""
        return {}

    def weights(self) -> GatedWeights:
        """The parameters, by what they are for."""
        return GatedWeights(_weights(self.gate_up), _weights(self.down))


class DecoderBlock(nn.Module):
    """norm, attention, norm, MLP; each norm first adds what came before it to the residual."""

    def __init__(
        self,
        spec: BlockSpec,
        names: Names,
        rotary: Rotary,
        choose: Choice,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.names = names
        self.input_norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.attention = SelfAttention(spec, names, rotary, choose, dtype, device)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.mlp: GatedMLP | SparseMLP
        if spec.experts is None:
            self.mlp = GatedMLP(spec, names, choose, dtype, device)
        else:
            act = spec.hidden_act
            self.mlp = SparseMLP(spec.hidden_size, spec.experts, act, names.experts, dtype=dtype, device=device)

    def forward(
        self, hidden_tm: Tensor, residual_tm: Tensor | None, cos_sin_tr: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """(MLP output, residual before it); the next norm adds them. `residual_tm` is None in the first block."""
        if residual_tm is None:
            hidden_tm, residual_tm = self.input_norm(hidden_tm), hidden_tm
        else:
            hidden_tm, residual_tm = self.input_norm.add_norm(hidden_tm, residual_tm)
        hidden_tm = self.attention(hidden_tm, cos_sin_tr, ctx)
        hidden_tm, residual_tm = self.mlp_norm.add_norm(hidden_tm, residual_tm)
        return self.mlp(hidden_tm), residual_tm

    def slots(self) -> dict[str, Tensor]:
        """Checkpoint names below the layer's prefix."""
        found: dict[str, Tensor] = {
            **self.attention.qkv.slots(),
            **self.attention.o.slots(),
            **self.mlp.slots(),
            f"{self.names.input_norm}.weight": self.input_norm.weight,
            f"{self.names.mlp_norm}.weight": self.mlp_norm.weight,
        }
        if self.attention.q_norm is not None and self.attention.k_norm is not None:
            found[f"{self.names.q_norm}.weight"] = self.attention.q_norm.weight
            found[f"{self.names.k_norm}.weight"] = self.attention.k_norm.weight
        return found

    def weights(self) -> BlockWeights:
        """The parameters of dense layers, by what they are for."""
        attention = self.attention
        norms = attention.q_norm, attention.k_norm
        q_gain_d, k_gain_d = (None if norm is None else norm.weight for norm in norms)
        return BlockWeights(
            attention=attention.shape,
            norm_eps=self.input_norm.eps,
            input_gain_m=self.input_norm.weight,
            qkv=_weights(attention.qkv),
            q_gain_d=q_gain_d,
            k_gain_d=k_gain_d,
            o=_weights(attention.o),
            mlp_gain_m=self.mlp_norm.weight,
            mlp=self.mlp.weights(),
        )


def _weights(linear: Linear) -> Weights:
    return Weights(linear.weight, linear.bias, linear.weight_scale)


def _sizes(experts: ExpertsSpec) -> tuple[int, int, int]:
    return experts.num_experts, experts.top_k, experts.intermediate_size


class Decoder(nn.Module):
    """A native model; see `models.base.CausalLM`. Parameters are allocated, not initialised.

    `decode_kernels` says who runs decode steps: "plain" the modules, "fused" the fused kernels (ModelError where they
    can't), "auto" the latter where they can. But for "plain", the modules too use fused kernels on CUDA (`use_joins`).
    `choose_under` gives the methods of the linear layers under a prefix. `deterministic`: no step's results depend on
    what else is in it (layers/invariant.py; the linear layers' methods and the attention backend must do their part).
    """

    is_capturable = True

    def __init__(
        self,
        family: Family,
        config: NormalConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,
        choose_under: Callable[[str], Choice] = lambda prefix: dense,
        decode_kernels: str = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.names = family.names
        self.vocab_size = config.vocab_size
        self.quantization = config.quantization
        specs = [family.block(config, layer) for layer in range(config.num_layers)]
        self.attention_specs = [spec.attention for spec in specs]
        self.rotary = Rotary(rotary_spec(config.rope, config.head_dim), max_length, device=device)
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.blocks = nn.ModuleList(
            DecoderBlock(spec, family.names, self.rotary, choose_under(family.names.layer.format(i=i)), dtype, device)
            for i, spec in enumerate(specs)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)
        self.is_tied = config.tie_word_embeddings
        self.head = (
            self.embed if self.is_tied else Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        )

        linears = linears_of(self)
        shape = DecoderShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size if any(spec.experts is None for spec in specs) else 0,
            experts=next((_sizes(spec.experts) for spec in specs if spec.experts is not None), None),
            hidden_act=config.hidden_act,
            rotary_dim=self.rotary.spec.rotary_dim,
            attention=tuple(self.attention_specs),
            is_dense=all(linear.weight.dtype in (dtype, torch.float8_e4m3fn) for linear in linears),
            dtype=dtype,
            has_fp8=any(linear.weight_scale is not None for linear in linears),
        )
        self.decode_kernels = None if deterministic else self._decode_kernels(decode_kernels, shape, device)
        if deterministic:
            self._sum_in_one_order()
        if DeviceTraits.of(device).kind == "cuda" and decode_kernels != "plain":
            self.use_joins(may_decode=not deterministic)

    def _sum_in_one_order(self) -> None:
        """Make the products that are no linear layer's batch-invariant. ModelError for experts without kernels."""
        self.head.project = invariant_logits
        for block in self.layers():
            if isinstance(block.mlp, SparseMLP):
                if not block.mlp.has_kernels:
                    raise ModelError("--deterministic can't run these experts, for which there are no kernels")
                block.mlp.score = invariant_scores

    def _decode_kernels(self, choice: str, shape: DecoderShape, device: torch.device) -> DecodeKernels | None:
        """The fused kernels over this model's parameters, or None to run its modules."""
        if choice == "plain":
            return None
        reason = obstacle(shape, DeviceTraits.of(device))
        if reason is None:
            from octavo.layers.fused.decode import FusedDecode  # loads Triton

            return FusedDecode(self.weights())
        if choice == "fused":
            raise ModelError(f"--decode-kernels fused can't run this model here: {reason}; use auto or plain")
        return None

    def use_joins(self, *, may_decode: bool = True) -> None:
        """From now on run what lies between the products with fused kernels; needs the Triton attention backend.
        `may_decode`: see `QkvAttention`."""
        from octavo.layers.fused.fp8_joins import quantize_between  # these load Triton
        from octavo.layers.fused.joins import use_joins
        from octavo.layers.fused.qkv_attention import QkvAttention

        pdl = DeviceTraits.of(self.norm.weight.device).has_dependent_launches
        use_joins(self, pdl=pdl)
        for block in self.layers():
            quantize_between(block.input_norm, block.attention.qkv, pdl=pdl)
            if isinstance(block.mlp, GatedMLP):
                quantize_between(block.mlp_norm, block.mlp.gate_up, pdl=pdl)
                quantize_between(block.mlp.act, block.mlp.down, pdl=pdl)
        for layer in (block.attention for block in self.layers()):
            if QkvAttention.fits(layer.attention, layer.rotary):
                layer.fused = QkvAttention(
                    layer.attention, layer.q_norm, layer.k_norm, layer.rotary, pdl=pdl, may_decode=may_decode
                )

    def weights(self) -> DecoderWeights:
        """The parameters, by what they are for; needs dense layers."""
        return DecoderWeights(
            embed_vm=self.embed.weight,
            blocks=[block.weights() for block in self.layers()],
            final_gain_m=self.norm.weight,
            head_vm=self.head.weight,
            rotary_table=self.rotary.table,
        )

    def layers(self) -> Iterator[DecoderBlock]:
        """The blocks, typed."""
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            yield block

    def set_attention_backend(self, backend: AttentionBackend) -> None:
        """Before the first step."""
        set_backend(self, backend)

    def forward(self, token_id_t: Tensor, position_t: Tensor, ctx: ForwardContext) -> Tensor:
        """See `CausalLM.forward`."""
        if self.decode_kernels is not None and self.decode_kernels.accepts(ctx):
            return self.decode_kernels.forward(token_id_t, ctx)
        hidden_tm: Tensor = self.embed(token_id_t)
        residual_tm: Tensor | None = None
        cos_sin_tr = self.rotary.gather(position_t)
        for block in self.layers():
            hidden_tm, residual_tm = block(hidden_tm, residual_tm, cos_sin_tr, ctx)
        assert residual_tm is not None
        normed_tm, _ = self.norm.add_norm(hidden_tm, residual_tm)
        return normed_tm

    def logits(self, hidden_sm: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        if self.decode_kernels is not None and self.decode_kernels.accepts_logits(hidden_sm):
            return self.decode_kernels.logits(hidden_sm)
        return self.head.logits(hidden_sm)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `CausalLM.load_weights`."""
        names = self.names
        merged: dict[str, Merged] = {}
        slots: dict[str, Tensor] = {
            f"{names.embed}.weight": self.embed.weight,
            f"{names.final_norm}.weight": self.norm.weight,
        }
        for i, block in enumerate(self.layers()):
            prefix = names.layer.format(i=i)
            slots |= {f"{prefix}.{name}": slot for name, slot in block.slots().items()}
            merged |= {f"{prefix}.{name}": part.below(prefix) for name, part in block.mlp.merged_slots().items()}
        tied: dict[str, str] = {}
        if self.is_tied:
            tied = {f"{names.head}.weight": f"{names.embed}.weight"}
        else:
            slots[f"{names.head}.weight"] = self.head.weight
        load_strict(slots, tied, as_kept(tensors, slots, self.quantization), merged)
        finish_linears(self)
