"""Decoders that Octavo has no layers for: the Transformers class itself, with its attention routed to ours.

The class is built on the meta device and run once there (transformers_probe.py), which yields the attention specs and
refuses what can't run before a weight is read. Its linear layers become ours, and norms and gated MLPs where that is
certain (transformers_layers.py). Then memory is allocated and buffers are computed (transformers_memory.py), weights
are streamed in, and steps run as one long sequence [1, t] without mask and cache.

Shape suffixes: t tokens of the step, s sampled rows, m model dim, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from octavo.attention.base import AttentionBackend, AttentionSpec, ForwardContext
from octavo.models.config import NormalConfig
from octavo.models.images import TEXT_MODELS, image_encoder
from octavo.models.transformers_build import ForeignOptions, build_on_meta
from octavo.models.transformers_layers import replace_layers, use_kernels
from octavo.models.transformers_memory import freeze_rope, materialize
from octavo.models.transformers_names import CheckpointNames
from octavo.models.transformers_probe import ATTENTION, handled_by, probe, register_attention
from octavo.models.transformers_weights import Checkpoint


@dataclass(slots=True)
class PagedStep:
    """Handles the attention calls of one forward pass."""

    specs: dict[nn.Module, AttentionSpec]
    backend: AttentionBackend
    ctx: ForwardContext

    def attend(
        self, module: nn.Module, q_1htd: Tensor, k_1gtd: Tensor, v_1gtd: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """[1, h, t, d] -> [1, t, h, V's dims]. Heads of K or V that are shorter than the other's get zeros."""
        spec, value_dim = self.specs[module], v_1gtd.shape[-1]
        q_thd, k_tgd, v_tgd = (
            F.pad(x[0].transpose(0, 1), (0, spec.head_dim - x.shape[-1])) for x in (q_1htd, k_1gtd, v_1gtd)
        )
        out_thd = self.backend.attend(spec, q_thd, k_tgd, v_tgd, self.ctx, options.get("s_aux"))
        return out_thd[..., :value_dim].unsqueeze(0)


class GivenHidden(nn.Module):
    """Stands where the decoder was in the causal LM, so that its own forward turns hidden states into logits."""

    def __init__(self, output_class: Any, decoder: nn.Module) -> None:
        super().__init__()
        self.output_class = output_class
        self.hidden_1sm: Tensor | None = None
        self.__dict__["decoder"] = decoder  # no submodule of it: its weights are counted once

    def __getattr__(self, name: str) -> Any:
        """What the causal LM wants to know of its decoder."""
        return getattr(self.__dict__["decoder"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever the arguments, the decoder's output holds `hidden_1sm`."""
        return self.output_class(last_hidden_state=self.hidden_1sm)


class TransformersModel(nn.Module):
    """A Transformers causal LM behind `models.base.CausalLM`."""

    is_capturable = True
    reads_together = False
    backend: AttentionBackend
    embedding: nn.Module

    def __init__(self, config: NormalConfig, options: ForeignOptions) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        register_attention()
        causal = build_on_meta(config, options.dtype, ATTENTION)
        frozen = freeze_rope(causal, options.max_length)
        found = probe(causal, config)
        names = CheckpointNames(causal)
        mixers = found.specs.keys()
        self.replaced = replace_layers(causal, f"{found.decoder}.", found.calls, mixers, options.choose, options.dtype)
        self.specs = found.specs
        self.attention_specs = list(found.specs.values())
        materialize(causal, options.device, frozen)
        if options.has_kernels:
            use_kernels(causal)
        self.checkpoint = Checkpoint(causal, names, config.quantization)
        self.decoder: Any = causal.get_submodule(found.decoder)
        self.__dict__["embedding"] = causal.get_input_embeddings()  # the decoder's own: its weights are counted once
        text_name = next((name for name in TEXT_MODELS if hasattr(self.decoder, name)), "")
        self.images = image_encoder(self.decoder, config, options.dtype, text_name, self.embedding, self.specs)
        self.given = GivenHidden(found.output_class, self.decoder)
        causal.set_submodule(found.decoder, self.given)
        self.head = causal

    def set_attention_backend(self, backend: AttentionBackend) -> None:
        """Before the first step."""
        self.backend = backend

    def forward(self, token_id_t: Tensor, position_t: Tensor, ctx: ForwardContext) -> Tensor:
        """See `CausalLM.forward`."""
        with handled_by(PagedStep(self.specs, self.backend, ctx)):
            output = self._decode(token_id_t, position_t, ctx)
        hidden_tm: Tensor = output.last_hidden_state[0]
        return hidden_tm

    def _decode(self, token_id_t: Tensor, position_t: Tensor, ctx: ForwardContext) -> Any:
        """The decoder's own output, from token ids or, where images are among them, from embeddings."""
        position = position_t.unsqueeze(0)
        if ctx.rope_position_3t is not None:
            position = ctx.rope_position_3t.unsqueeze(1)
        if ctx.media is None:
            return self.decoder(input_ids=token_id_t.unsqueeze(0), position_ids=position, use_cache=False)
        plain_tm = self.embedding(token_id_t)
        embedded_1tm = ctx.media.embedded(plain_tm).unsqueeze(0)
        deep = ctx.media.deep_features(*plain_tm.shape)
        if deep is None:
            return self.decoder(inputs_embeds=embedded_1tm, position_ids=position, use_cache=False)
        return self.decoder.language_model(
            inputs_embeds=embedded_1tm,
            position_ids=position,
            visual_pos_masks=deep[0].unsqueeze(0),
            deepstack_visual_embeds=deep[1],
            use_cache=False,
        )

    def logits(self, hidden_sm: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        self.given.hidden_1sm = hidden_sm.unsqueeze(0)
        logits_sv: Tensor = self.head(inputs_embeds=self.given.hidden_1sm, use_cache=False).logits[0]
        self.given.hidden_1sm = None
        return logits_sv.float()

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `CausalLM.load_weights`."""
        self.checkpoint.load(self, tensors)
