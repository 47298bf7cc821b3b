"""The decoder that the native families share: an embedding, blocks (block.py) and a head, made for a `Family`.

The modules here run every step on every device. Where `octavo.layers.fused` supports the decoder, its kernels run the
decode steps instead, from the same parameters. Models that no family describes go through transformers_backend.py.

Shape suffixes: t tokens of the step, s sampled rows, m model dim, r rotary dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from octavo.attention.base import AttentionBackend, AttentionSpec, ForwardContext
from octavo.errors import ModelError
from octavo.layers.attention import set_backend
from octavo.layers.embedding import Embedding
from octavo.layers.fused.base import DecodeKernels, DecoderWeights
from octavo.layers.fused.support import DecoderShape, DeviceTraits, obstacle
from octavo.layers.gated_delta import GatedDeltaMixer
from octavo.layers.invariant import invariant_heads, invariant_logits, invariant_scores
from octavo.layers.linear import Choices, dense
from octavo.layers.moe import ExpertsSpec, Merged, SparseMLP
from octavo.layers.norm import LayerNorm, RMSNorm, make_norm, whole
from octavo.layers.quant.fp8_experts import experts_apart
from octavo.layers.quant.fp8_tensors import as_kept
from octavo.layers.rotary import Rotary
from octavo.layers.state_space import StateSpaceMixer
from octavo.models.block import DecoderBlock, SelfAttention
from octavo.models.config import NormalConfig
from octavo.models.family import BlockSpec, Family, Scales, Tensors
from octavo.models.images import ImageEncoder
from octavo.models.latent import LatentAttention
from octavo.models.mlp import GatedMLP
from octavo.models.weights import finish_products, linears_of, load_strict

T = TypeVar("T")


def _sizes(experts: ExpertsSpec) -> tuple[int, int, int]:
    return experts.num_experts, experts.top_k, experts.intermediate_size


class Decoder(nn.Module):
    """A native model; see `models.base.CausalLM`. Parameters are allocated, not initialised.

    `decode_kernels` says who runs decode steps: "plain" the modules, "fused" the fused kernels (ModelError where they
    can't), "auto" the latter where they can. But for "plain", the modules too use fused kernels on CUDA (`use_joins`).
    `choose` gives the methods of the linear layers of a block (its number, its prefix). `deterministic`: no step's
    results depend on what else is in it (layers/invariant.py; the linear layers' methods and the attention backend must
    do their part).
    """

    images: ImageEncoder | None = None

    def __init__(
        self,
        family: Family,
        config: NormalConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,
        choose: Callable[[int, str], Choices] = lambda layer, prefix: Choices(dense, dense),
        decode_kernels: str = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.names = family.names
        self.convert: Callable[[Tensors], Tensors] = lambda tensors: tensors
        if family.convert is not None:
            self.convert = partial(family.convert, config)
        self.vocab_size = config.vocab_size
        self.quantization = config.quantization
        specs = [family.block(config, layer) for layer in range(config.num_layers)]
        self.attention_specs = [cache for spec in specs for cache in spec.caches]
        ropes = list(dict.fromkeys(spec.rope for spec in specs if spec.rope is not None))
        rotaries = [Rotary(rope, max_length, device=device) for rope in ropes]
        self.rotaries = nn.ModuleList(rotaries)
        self.layer_rotaries = [None if spec.rope is None else ropes.index(spec.rope) for spec in specs]
        """Of each layer, which of `rotaries` it has."""
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.blocks = nn.ModuleList(
            DecoderBlock(spec, family.names, rotary, choose(i, family.names.layer.format(i=i)), dtype, device)
            for i, (spec, rotary) in enumerate(zip(specs, self._of_layers(rotaries), strict=True))
        )
        self.norm = make_norm(specs[0].norm, config.hidden_size, dtype=dtype, device=device)
        scales = family.scales(config)
        self.embedding_scale = float(torch.tensor(scales.embedding, dtype=dtype))  # Transformers rounds Gemma's so
        self.logit_scale, self.logit_cap = scales.logits, scales.logit_cap
        mixtures = [module for module in self.modules() if isinstance(module, SparseMLP)]
        self.is_capturable = all(mixture.has_kernels for mixture in mixtures)  # others ask the device for sizes
        self.reads_together = False
        self.is_tied = config.tie_word_embeddings
        self.head = (
            self.embed if self.is_tied else Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        )

        self.head_bias: nn.Parameter | None = None
        if family.has_head_bias(config):
            self.head_bias = nn.Parameter(
                torch.empty(config.vocab_size, dtype=dtype, device=device), requires_grad=False
            )

        shape = self._shape(config, specs, scales, dtype)
        self.decode_kernels = None if deterministic else self._decode_kernels(decode_kernels, shape, device)
        if deterministic:
            self._sum_in_one_order()
        if DeviceTraits.of(device).kind == "cuda" and decode_kernels != "plain":
            self.use_joins(may_decode=not deterministic)

    def _of_layers(self, items: Sequence[T]) -> list[T | None]:
        """One of as many items as there are rotations, for each layer."""
        return [None if i is None else items[i] for i in self.layer_rotaries]

    def _shape(self, config: NormalConfig, specs: list[BlockSpec], scales: Scales, dtype: torch.dtype) -> DecoderShape:
        linears = linears_of(self)
        extras = [name for spec in specs for name in spec.extras()]
        extras += ["layers with different rotations"] if len(set(self.layer_rotaries)) > 1 else []
        extras += ["bias of logits"] if self.head_bias is not None else []
        extras += ["scaled embeddings or logits"] if scales != Scales() else []
        return DecoderShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size if any(spec.experts is None for spec in specs) else 0,
            experts=next((_sizes(spec.experts) for spec in specs if spec.experts is not None), None),
            hidden_act=specs[0].hidden_act,
            rotary_dim=next((spec.rope.rotary_dim for spec in specs if spec.rope is not None), 0),
            attention=tuple(spec for spec in self.attention_specs if isinstance(spec, AttentionSpec)),
            is_dense=all(linear.weight.dtype in (dtype, torch.float8_e4m3fn) for linear in linears),
            dtype=dtype,
            fp8_shares=frozenset(linear.share for linear in linears if linear.weight_scale is not None),
            extras=tuple(extras),
        )

    def _sum_in_one_order(self) -> None:
        """Make the products that are no linear layer's batch-invariant. ModelError for experts without kernels."""
        self.head.project = invariant_logits
        for module in self.modules():
            if isinstance(module, LatentAttention):
                module.multiply = invariant_heads
            if isinstance(module, StateSpaceMixer | GatedDeltaMixer):
                raise ModelError("--deterministic can't run recurrent layers, whose sums depend on how prompts are cut")
            if isinstance(module, SparseMLP):
                if not module.has_kernels:
                    raise ModelError("--deterministic can't run these experts, for which there are no kernels")
                module.score = invariant_scores

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
            layer = block.attention
            reads_alone = not block.is_parallel and block.beside is None
            if isinstance(block.input_norm, RMSNorm) and reads_alone and isinstance(layer, SelfAttention):
                quantize_between(block.input_norm, layer.qkv, pdl=pdl)
            if isinstance(block.mlp, GatedMLP):
                if isinstance(block.mlp_norm, RMSNorm):
                    quantize_between(block.mlp_norm, block.mlp.gate_up, pdl=pdl)
                quantize_between(block.mlp.act, block.mlp.down, pdl=pdl)
        if may_decode:
            self._sum_between(pdl=pdl)
        for layer in (block.attention for block in self.layers()):
            if isinstance(layer, LatentAttention):
                layer.use_fused(pdl=pdl)
            elif (
                isinstance(layer, SelfAttention)
                and layer.rotary is not None
                and not layer.norms_rotated
                and layer.temperature is None
                and QkvAttention.fits(layer.attention, layer.q_norm, layer.rotary)
            ):
                layer.fused = QkvAttention(
                    layer.attention, layer.q_norm, layer.k_norm, layer.rotary, pdl=pdl, may_decode=may_decode
                )
                self.reads_together |= layer.fused.decodes and not layer.attention.spec.window

    def _sum_between(self, *, pdl: bool) -> None:
        """Let norms add up what the products before them leave in parts."""
        from octavo.layers.fused.part_sums import sum_between  # loads Triton

        blocks = list(self.layers())
        following = [*(block.input_norm for block in blocks[1:]), self.norm]
        for block, next_norm in zip(blocks, following, strict=True):
            if block.is_parallel or block.residual_scale != 1.0:
                continue
            layer, mlp = block.attention, block.mlp
            if isinstance(layer, SelfAttention) and isinstance(block.mlp_norm, RMSNorm) and not block.norms_after:
                sum_between(layer.o, block.mlp_norm, pdl=pdl)
            if isinstance(mlp, GatedMLP) and isinstance(next_norm, RMSNorm) and not block.norms_after:
                sum_between(mlp.down, next_norm, pdl=pdl)

    def weights(self) -> DecoderWeights:
        """The parameters, by what they are for; of a decoder without `DecoderShape.extras`."""
        assert isinstance(self.norm, RMSNorm)
        (rotary,) = self._rotaries()
        return DecoderWeights(
            embed_vm=self.embed.weight,
            blocks=[block.weights() for block in self.layers()],
            final_gain_m=self.norm.weight,
            head_vm=self.head.weight,
            rotary_table=rotary.table,
        )

    def layers(self) -> Iterator[DecoderBlock]:
        """The blocks, typed."""
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            yield block

    def _rotaries(self) -> Iterator[Rotary]:
        for rotary in self.rotaries:
            assert isinstance(rotary, Rotary)
            yield rotary

    def set_attention_backend(self, backend: AttentionBackend) -> None:
        """Before the first step."""
        set_backend(self, backend)

    def forward(self, token_id_t: Tensor, position_t: Tensor, ctx: ForwardContext) -> Tensor:
        """See `CausalLM.forward`."""
        if self.decode_kernels is not None and ctx.media is None and self.decode_kernels.accepts(ctx):
            return self.decode_kernels.forward(token_id_t, ctx)
        hidden_tm = self.embedded(token_id_t)
        if ctx.media is not None:
            hidden_tm = ctx.media.embedded(hidden_tm)
        residual_tm: Tensor | None = None
        turned = position_t if ctx.rope_position_3t is None else ctx.rope_position_3t
        angles = self._of_layers([rotary.gather(turned) for rotary in self._rotaries()])
        for layer, (block, cos_sin_tr) in enumerate(zip(self.layers(), angles, strict=True)):
            hidden_tm, residual_tm = block(hidden_tm, residual_tm, cos_sin_tr, ctx)
            if ctx.media is not None:
                hidden_tm = ctx.media.deepened(whole(hidden_tm, residual_tm), layer)
        assert residual_tm is not None
        normed_tm, _ = self.norm.add_norm(hidden_tm, residual_tm)
        return normed_tm

    def embedded(self, token_id_t: Tensor) -> Tensor:
        """What the first block reads of tokens [t, m]."""
        hidden_tm: Tensor = self.embed(token_id_t)
        return hidden_tm if self.embedding_scale == 1.0 else hidden_tm * self.embedding_scale

    def logits(self, hidden_sm: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        if self.decode_kernels is not None and self.decode_kernels.accepts_logits(hidden_sm):
            return self.decode_kernels.logits(hidden_sm)
        logits_sv = self.head.logits(hidden_sm)
        if self.head_bias is not None:
            logits_sv = logits_sv + self.head_bias
        if self.logit_scale != 1.0:
            logits_sv = logits_sv * self.logit_scale
        return torch.tanh(logits_sv / self.logit_cap) * self.logit_cap if self.logit_cap else logits_sv

    def slots(self) -> dict[str, Tensor]:
        """Checkpoint name -> the part of a parameter that it fills."""
        names = self.names
        slots: dict[str, Tensor] = {
            f"{names.embed}.weight": self.embed.weight,
            **self.norm.slots(names.final_norm),
        }
        for i, block in enumerate(self.layers()):
            prefix = names.layer.format(i=i)
            slots |= {f"{prefix}.{name}": slot for name, slot in block.slots().items()}
        if not self.is_tied:
            slots[f"{names.head}.weight"] = self.head.weight
        if self.head_bias is not None:
            slots[f"{names.head}.bias"] = self.head_bias
        return slots

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `CausalLM.load_weights`."""
        names, slots = self.names, self.slots()
        merged: dict[str, Merged] = {}
        for i, block in enumerate(self.layers()):
            prefix = names.layer.format(i=i)
            merged |= {f"{prefix}.{name}": part.below(prefix) for name, part in block.merged_slots().items()}
        tied = {f"{names.head}.weight": f"{names.embed}.weight"} if self.is_tied else {}
        apart = experts_apart(self.convert(tensors), merged, self.quantization)
        load_strict(slots, tied, as_kept(apart, slots, self.quantization, merged), merged)
        finish_products(self)
        for module in self.modules():
            if isinstance(module, RMSNorm | LayerNorm):
                module.finish()
