"""Mamba 2 (Dao and Gu, 2024): blocks of one norm and one state-space layer; the cache holds states only.

Shape suffixes: t tokens of the step, s sampled rows, m model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.base import AttentionBackend, ForwardContext
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Choice, Choices, dense
from octavo.layers.norm import NormSpec, RMSNorm
from octavo.layers.parts import Parts
from octavo.layers.quant.fp8_tensors import as_kept
from octavo.layers.state_space import StateSpaceMixer, StateSpaceSpec
from octavo.models.config import NormalConfig
from octavo.models.images import ImageEncoder
from octavo.models.weights import finish_products, load_strict

LAYER = "backbone.layers.{i}"
"""What checkpoints call a block."""


def mixer_spec(text: Any) -> StateSpaceSpec:
    """From Transformers' config class, which fills in what a config.json leaves out."""
    low, high = text.time_step_limit
    return StateSpaceSpec(
        hidden_size=text.hidden_size,
        num_heads=text.num_heads,
        head_dim=text.head_dim,
        state_dim=text.state_size,
        num_groups=text.n_groups,
        taps=text.conv_kernel,
        norm_eps=text.layer_norm_epsilon,
        has_bias=text.use_bias,
        has_conv_bias=text.use_conv_bias,
        step_limits=(float(low), float(high)),
    )


class Block(nn.Module):
    """Residuals in fp32, as most checkpoints have them, or in the model's numbers."""

    def __init__(
        self,
        spec: StateSpaceSpec,
        layer: int,
        choose: Choice,
        *,
        is_wide: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(spec.hidden_size, NormSpec(spec.norm_eps), dtype=dtype, device=device)
        self.mixer = StateSpaceMixer(spec, layer, Parts(choose, dtype, device, "mixer"))
        self.is_wide = is_wide

    def forward(self, hidden_tm: Tensor, ctx: ForwardContext) -> Tensor:
        """[t, m] -> [t, m]."""
        dtype = self.norm.weight.dtype
        mixed_tm: Tensor = self.mixer(self.norm(hidden_tm.to(dtype)), None, ctx)
        return (hidden_tm.float() if self.is_wide else hidden_tm) + mixed_tm


class Mamba2(nn.Module):
    """See `models.base.CausalLM`."""

    is_capturable = True
    reads_together = False
    images: ImageEncoder | None = None

    def __init__(
        self,
        config: NormalConfig,
        text: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        choose: Callable[[int, str], Choices] = lambda layer, prefix: Choices(dense, dense),
    ) -> None:
        """`text`: Transformers' config of the model; `choose` gives the methods of a block's products (its number, its
        prefix)."""
        super().__init__()
        spec = mixer_spec(text)
        self.vocab_size = config.vocab_size
        self.embed = Embedding(config.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.blocks = nn.ModuleList(
            Block(
                spec,
                layer,
                choose(layer, LAYER.format(i=layer)).mixer,
                is_wide=text.residual_in_fp32,
                dtype=dtype,
                device=device,
            )
            for layer in range(config.num_layers)
        )
        self.quantization = config.quantization
        self.norm = RMSNorm(spec.hidden_size, NormSpec(spec.norm_eps), dtype=dtype, device=device)
        self.is_tied = config.tie_word_embeddings
        self.head = (
            self.embed if self.is_tied else Embedding(config.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        )
        self.attention_specs = [block.mixer.state for block in self.layers()]

    def layers(self) -> Iterator[Block]:
        """The blocks, typed."""
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def set_attention_backend(self, backend: AttentionBackend) -> None:
        """Nothing attends."""

    def forward(self, token_id_t: Tensor, position_t: Tensor, ctx: ForwardContext) -> Tensor:
        """See `CausalLM.forward`."""
        hidden_tm: Tensor = self.embed(token_id_t)
        for block in self.layers():
            hidden_tm = block(hidden_tm, ctx)
        normed_tm: Tensor = self.norm(hidden_tm.to(self.norm.weight.dtype))
        return normed_tm

    def logits(self, hidden_sm: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return self.head.logits(hidden_sm)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `CausalLM.load_weights`."""
        slots: dict[str, Tensor] = {
            "backbone.embeddings.weight": self.embed.weight,
            "backbone.norm_f.weight": self.norm.weight,
        }
        if not self.is_tied:
            slots["lm_head.weight"] = self.head.weight
        for layer, block in enumerate(self.layers()):
            prefix = LAYER.format(i=layer)
            slots[f"{prefix}.norm.weight"] = block.norm.weight
            slots |= {f"{prefix}.{name}": slot for name, slot in block.mixer.slots().items()}
        tied = {"lm_head.weight": "backbone.embeddings.weight"} if self.is_tied else {}
        load_strict(slots, tied, as_kept(tensors, slots, self.quantization))
        finish_products(self)
