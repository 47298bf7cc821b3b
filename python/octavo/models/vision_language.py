"""Image-text models whose text model is a native family: Octavo's decoder for text, Transformers' modules for images.

The Transformers class is built on the meta device, its text model is taken out, and what is left (vision tower,
projector) gets its memory and weights here. Not here: text models that are no native family (transformers_backend.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.base import AttentionBackend, ForwardContext
from octavo.layers.quant.fp8_tensors import as_kept
from octavo.models.config import NormalConfig
from octavo.models.decoder import Decoder
from octavo.models.images import ImageEncoder, image_encoder
from octavo.models.transformers_memory import materialize
from octavo.models.transformers_names import CheckpointNames
from octavo.models.weights import load_strict

TEXT_MODELS = ("language_model", "text_model")
"""Where classes keep their text model."""


def has_plain_text(causal: Any, text: NormalConfig) -> bool:
    """The class is a text model with nothing but a linear head behind it, and images beside it; both count positions in
    as many dimensions."""
    base = getattr(causal, "model", None)
    if base is None or not _text_name(base) or type(getattr(causal, "lm_head", None)) is not nn.Linear:
        return False
    return hasattr(base, "get_rope_index") == bool(text.rope.axes)


def _text_name(base: Any) -> str:
    return next((name for name in TEXT_MODELS if isinstance(getattr(base, name, None), nn.Module)), "")


class VisionLanguage(nn.Module):
    """See `models.base.CausalLM`; `text` runs the steps. `causal`: the Transformers class on the meta device."""

    def __init__(
        self, config: NormalConfig, causal: Any, text: Decoder, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.text = text
        self.vocab_size = text.vocab_size
        self.is_capturable = text.is_capturable
        self.reads_together = text.reads_together
        self.attention_specs = text.attention_specs
        self._names = CheckpointNames(causal)
        self._quantization = config.quantization
        base: Any = causal.model
        self._text_name = _text_name(base)
        setattr(base, self._text_name, nn.Identity())
        causal.lm_head = nn.Identity()
        causal.tie_weights = lambda *args, **options: None  # what was tied is the decoder's
        if device.type != "meta":
            materialize(causal, device, [])
        self.vision = base
        self.images: ImageEncoder | None = image_encoder(base, config, dtype, ())

    def set_attention_backend(self, backend: AttentionBackend) -> None:
        """Before the first step."""
        self.text.set_attention_backend(backend)

    def forward(self, token_id_t: Tensor, position_t: Tensor, ctx: ForwardContext) -> Tensor:
        """See `CausalLM.forward`."""
        return self.text.forward(token_id_t, position_t, ctx)

    def logits(self, hidden_sm: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return self.text.logits(hidden_sm)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `CausalLM.load_weights`. What is not the text model's is held until that is filled."""
        held: list[tuple[str, Tensor]] = []
        self.text.load_weights(self._text_tensors(tensors, held))
        load_strict(self.vision.state_dict(keep_vars=True, prefix="model."), {}, held)

    def _text_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], others: list[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """The text model's tensors, under the names that it has alone."""
        prefix = f"model.{self._text_name}."
        for name, tensor in self._names.convert(as_kept(tensors, {}, self._quantization)):
            if name.startswith(prefix):
                yield f"model.{name.removeprefix(prefix)}", tensor
            elif name.startswith("lm_head."):
                yield name, tensor
            else:
                others.append((name, tensor))
