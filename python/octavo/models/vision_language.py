"""Image-text models whose text model is a native family: Octavo's decoder for text, Transformers' modules for images.

The Transformers class is built on the meta device, its text model is taken out, and what is left (vision tower,
projector) gets its memory and weights here. Not here: text models that are no native family (transformers_backend.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.base import AttentionBackend, ForwardContext
from octavo.layers.quant.fp8_tensors import as_kept
from octavo.layers.quant.stored import Quantization
from octavo.models.config import NormalConfig
from octavo.models.decoder import Decoder
from octavo.models.images import TEXT_MODELS, ImageEncoder, image_encoder
from octavo.models.transformers_memory import materialize
from octavo.models.transformers_names import CheckpointNames
from octavo.models.weights import load_strict


@dataclass(frozen=True, slots=True)
class TextPlace:
    """Where a class keeps its text model, which nothing but a linear head follows."""

    base: Any
    """The module that has it beside what reads images."""
    base_path: str
    """Its place in the class, with a dot behind it."""
    name: str
    """The text model's, in the base."""
    renamed: dict[str, str]
    """Beginnings of the text model's tensors in the class -> in the text model alone."""

    @classmethod
    def find(cls, causal: Any, text: NormalConfig) -> TextPlace | None:
        """None for a class of another form, or one that counts positions in other dimensions than the text model."""
        base = getattr(causal, "model", None)
        place: TextPlace | None = None
        for name in TEXT_MODELS:
            inner, whole = getattr(base, name, None), getattr(causal, name, None)
            if isinstance(inner, nn.Module) and _is_linear(causal):
                place = cls(base, "model.", name, {f"model.{name}.": "model.", "lm_head.": "lm_head."})
            elif _is_linear(whole) and isinstance(getattr(whole, "model", None), nn.Module):
                place = cls(causal, "", name, {f"{name}.": ""})
        if place is None or hasattr(place.base, "get_rope_index") != bool(text.rope.axes):
            return None
        return place

    def own_name(self, name: str) -> str | None:
        """Of a tensor of the class, its name in the text model alone; None: it is not the text model's."""
        old = next((old for old in self.renamed if name.startswith(old)), None)
        return None if old is None else self.renamed[old] + name.removeprefix(old)

    def stored(self, quantization: Quantization | None, names: CheckpointNames) -> Quantization | None:
        """What a checkpoint says of quantized weights, for the text model alone. Its patterns may have the names of any
        class that the model ever had, as far as the class of today reads them."""
        if quantization is None:
            return None
        own = next(old if new else f"{old}model." for old, new in self.renamed.items())
        former = (
            "model.",
            f"model.{self.name}.",
            f"{self.name}.model.",
            f"{self.name}.",
            f"model.{self.name}.model.",
            "",
        )
        below = next(name.removeprefix(own) for name in names.known if name.startswith(own))
        read = [beginning for beginning in former if names.plain_name(beginning + below) == own + below]
        return replace(quantization, beginnings=(own, *read))


def _is_linear(causal: Any) -> bool:
    return type(getattr(causal, "lm_head", None)) is nn.Linear


class VisionLanguage(nn.Module):
    """See `models.base.CausalLM`; `text` runs the steps. `causal`: the Transformers class on the meta device, which
    reads a checkpoint's `names`."""

    def __init__(
        self,
        config: NormalConfig,
        causal: Any,
        place: TextPlace,
        text: Decoder,
        names: CheckpointNames,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.text = text
        self.vocab_size = text.vocab_size
        self.is_capturable = text.is_capturable
        self.reads_together = text.reads_together
        self.attention_specs = text.attention_specs
        self._names = names
        self._quantization = config.quantization
        self._place = place
        setattr(place.base, place.name, nn.Identity())
        causal.lm_head = nn.Identity()
        causal.tie_weights = lambda *args, **options: None  # what was tied is the decoder's
        materialize(causal, device, [])
        self.vision = place.base
        self.images: ImageEncoder | None = image_encoder(place.base, config, dtype, place.name, text.embedded)

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
        load_strict(self.vision.state_dict(keep_vars=True, prefix=self._place.base_path), {}, held)

    def _text_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], others: list[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """The text model's tensors, under the names that it has alone; its fp8 layers as they are, all others wide."""
        slots = self.text.slots()

        def is_own(layer: str) -> bool:
            return f"{self._place.own_name(self._names.layer_name(layer))}.weight" in slots

        for name, tensor in self._names.convert(
            as_kept(self._names.wanted(tensors), {}, self._quantization, passes=is_own)
        ):
            own = self._place.own_name(name)
            if own is None:
                others.append((name, tensor))
            else:
                yield own, tensor
