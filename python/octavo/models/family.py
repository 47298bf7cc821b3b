"""What a native family is: its checkpoint's names, and its blocks as data (`BlockSpec`). Not here: the modules that are
made from them (block.py, decoder.py).

A family's file (llama.py, gemma2.py …) starts from `block_spec`, which is Llama's, and replaces what differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from octavo.attention.base import AttentionSpec, CacheSpec, StateSpec
from octavo.errors import ModelError
from octavo.layers.frequencies import RotarySpec
from octavo.layers.gated_delta import GatedDeltaSpec
from octavo.layers.moe import ExpertNames, ExpertsSpec, Routing
from octavo.layers.norm import NormSpec
from octavo.layers.state_space import StateSpaceSpec
from octavo.models.config import NormalConfig
from octavo.models.description import rotary_spec


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries at position p are multiplied by 1 + scale * log(1 + floor((p + 1) / floor)) (Llama 4)."""

    floor: float
    scale: float


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Sizes of multi-head latent attention (DeepSeek-V2, section 2.1)."""

    query_rank: int
    """Of the latent that queries are made from; 0: they are made from the hidden states."""
    rank: int
    """Of the latent that keys and values are made from."""
    plain_dim: int
    """Dims of a query or key head that are not rotated."""
    rotated_dim: int
    value_dim: int
    norm: NormSpec
    """Of the latents."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One decoder block: sizes and options."""

    hidden_size: int
    intermediate_size: int
    attention: AttentionSpec
    rope: RotarySpec | None
    """None: q and k are not rotated."""
    norm: NormSpec
    hidden_act: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    """Norm of q and of k: none, over each head, or over all heads together."""
    qk_norm_spec: NormSpec | None = None
    """Of those norms; None: they are as the block's."""
    norms_rotated: bool = False
    """Those norms are over heads, and come after the rotation instead of before."""
    temperature: Temperature | None = None
    """Queries grow with their position."""
    norms_before: bool = True
    """What attention and MLP read is normalized."""
    norms_after: bool = False
    """What they give is normalized before it is added to the residual."""
    is_parallel: bool = False
    """Attention and MLP read the same hidden states, and are added together."""
    has_own_norm: bool = False
    """Of a parallel block: the MLP reads a norm of its own; otherwise attention's."""
    residual_scale: float = 1.0
    """What attention and MLP give is multiplied by it before it is added."""
    is_gated: bool = True
    """The MLP is down(act(gate) * up); otherwise down(act(up))."""
    experts: ExpertsSpec | None = None
    """The MLP is a mixture of such experts."""
    shared_size: int = 0
    """Beside the mixture there is an MLP of this size that every token takes; 0: there isn't."""
    latent: LatentSpec | None = None
    """Attention is of latents (latent.py); qkv's options are then of no meaning."""
    recurrent: StateSpaceSpec | GatedDeltaSpec | None = None
    """In the place of attention there is such a layer; of `attention`, its number alone has a meaning then."""
    is_beside: bool = False
    """The recurrent layer does not take attention's place but reads what it reads, and their results are added."""
    has_mixer: bool = True
    """Otherwise there is neither: the block is an MLP, and keeps nothing."""
    has_mlp: bool = True
    has_gates: bool = False
    """What heads give is multiplied by sigmoids of gates, a number of the same product as q, k and v each."""
    has_sinks: bool = False
    """Each query head has a learned score without a value (`AttentionBackend.attend`)."""

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What the block keeps of a sequence: up to two, whose numbers follow each other."""
        if not self.has_mixer:
            return ()
        if self.recurrent is None:
            return (self.attention,)
        state = StateSpec(self.attention.layer + self.is_beside, self.recurrent.state_size)
        return (self.attention, state) if self.is_beside else (state,)

    def extras(self) -> tuple[str, ...]:
        """What no block of Llama, Qwen or Mixtral has, in words; kernels of whole blocks know only those."""
        rope, norm = self.rope, self.norm
        found = {
            "norms of this kind": norm != NormSpec(norm.eps),
            "norms after attention and MLP": self.norms_after or not self.norms_before,
            "MLPs beside attention": self.is_parallel,
            "scaled residuals": self.residual_scale != 1.0,
            "norms over all heads": self.qk_norm == "all",
            "norms of q and k of this kind": self.norms_rotated or self.qk_norm_spec is not None,
            "queries that grow": self.temperature is not None,
            "MLPs without a gate": not self.is_gated,
            "an MLP beside the experts": self.experts is not None and self.shared_size > 0,
            "experts of this kind": self.experts is not None and not self.experts.is_plain,
            "attention of latents": self.latent is not None,
            "recurrent layers": self.recurrent is not None or not (self.has_mixer and self.has_mlp),
            "gates of heads": self.has_gates,
            "rotations of this kind": rope is None or rope.is_interleaved or bool(rope.axes),
        }
        return tuple(name for name, is_there in found.items() if is_there)


@dataclass(frozen=True, slots=True)
class Scales:
    """What a model multiplies its embeddings and its logits by."""

    embedding: float = 1.0
    logits: float = 1.0
    logit_cap: float = 0.0
    """Logits become cap * tanh(logit / cap); 0: they don't."""


@dataclass(frozen=True, slots=True)
class SharedNames:
    """What a checkpoint calls the MLP beside a mixture, and what weighs it ("": nothing does)."""

    mlp: str = "mlp.shared_expert"
    gate: str = "mlp.shared_expert_gate"
    gate_up: str = ""
    """One tensor in the place of the MLP's gate and up, below it."""
    down: str = "down_proj"


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
    qkv: str = ""
    """One tensor in the place of q, k and v."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    gates: str = "self_attn.q_gate"
    sinks: str = "self_attn.sinks"
    recurrent: str = "linear_attn"
    """Prefix of a recurrent layer."""
    q_down: str = "self_attn.q_a_proj"
    q_latent_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_latent_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"
    """These six and `q` are of attention of latents."""
    attention_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""
    """One tensor in the place of gate and up."""
    down: str = "mlp.down_proj"
    act: str = "mlp.act_fn"
    """Of an activation that has parameters."""
    mlp_out_norm: str = ""
    experts: ExpertNames = ExpertNames()
    shared: SharedNames = SharedNames()


def _no_scales(config: NormalConfig) -> Scales:
    return Scales()


def _no_head_bias(config: NormalConfig) -> bool:
    return False


Tensors = Iterable[tuple[str, Tensor]]
"""Named tensors of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: where its tensors are, and what its blocks are."""

    names: Names
    block: Callable[[NormalConfig, int], BlockSpec]
    """(config, layer index) -> the layer's block."""
    scales: Callable[[NormalConfig], Scales] = _no_scales
    convert: Callable[[NormalConfig, Tensors], Tensors] | None = None
    """The checkpoint's tensors -> those that `names` name; None: they are."""
    has_head_bias: Callable[[NormalConfig], bool] = _no_head_bias
    """Logits have a bias."""


def renamed(*rules: tuple[str, str]) -> Callable[[NormalConfig, Tensors], Tensors]:
    """A `Family.convert`: each rule is a regular expression, and what takes its place in a name."""
    patterns = [(re.compile(pattern), new) for pattern, new in rules]

    def convert(config: NormalConfig, tensors: Tensors) -> Tensors:
        for name, tensor in tensors:
            for pattern, new in patterns:
                name = pattern.sub(new, name)
            yield name, tensor

    return convert


def without(prefix: str) -> Callable[[NormalConfig, Tensors], Tensors]:
    """A `Family.convert` that leaves tensors out, of drafters beside the model."""

    def convert(config: NormalConfig, tensors: Tensors) -> Tensors:
        return ((name, tensor) for name, tensor in tensors if not name.startswith(prefix))

    return convert


def layer_kind(config: NormalConfig, layer: int) -> str:
    """Of a hybrid's layer, its name in layer_kinds.py. ModelError: the config's model type is of another family."""
    if not config.layer_kinds:
        raise ModelError(f"config.json: model_type {config.model_type!r} is not one of {config.architecture}'s")
    return config.layer_kinds[layer]


def block_spec(config: NormalConfig, layer: int) -> BlockSpec:
    """Llama's block without biases: the config's sizes, window and rotation, scores scaled by 1 / sqrt(head_dim)."""
    rotates = config.layer_rotates[layer] if config.layer_rotates else True
    attention = AttentionSpec(
        layer=layer,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=config.layer_windows[layer],
        chunk=config.layer_chunks[layer] if config.layer_chunks else 0,
    )
    return BlockSpec(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        attention=attention,
        rope=rotary_spec(config.rope, config.head_dim) if rotates else None,
        norm=NormSpec(config.norm_eps),
        hidden_act=config.hidden_act,
        experts=experts_spec(config, layer),
    )


def experts_spec(config: NormalConfig, layer: int) -> ExpertsSpec | None:
    """The layer's mixture of experts; None: it has a plain MLP."""
    experts = config.experts
    if experts is None or not experts.is_sparse[layer]:
        return None
    routing = Routing(renormalize=experts.renormalize)
    return ExpertsSpec(experts.num_experts, experts.top_k, experts.intermediate_size, routing)
