"""Whether a Transformers image-text class that nobody has looked at treats images the way Octavo runs them: two trial
pictures go through the class itself, and what reaches its text model is compared with what Octavo would give it.

So a class may expand, encode and place images as it likes, as long as its text model gets embeddings in the places of
the image token, known positions, and no masks or inputs of its own. Not here: the pictures (multimodal/processor.py).

Shape suffixes: t tokens of the trial prompt, m model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.media import MediaInput
from octavo.errors import ModelError

NEUTRAL = ("past_key_values", "cache", "cache_params", "use_cache", "cache_position", "return_dict", "input_ids")
"""Arguments of text models that say nothing of the prompt here, or are checked to be absent by the embeddings."""
DEEP = ("visual_pos_masks", "deepstack_visual_embeds")


class _Reached(BaseException):
    """The class has called its text model."""


class Recorder(nn.Module):
    """Stands where the text model was; keeps what it is given."""

    def __init__(self, config: Any, embed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _Embedding(embed)
        self.given: dict[str, Any] = {}

    def get_input_embeddings(self) -> nn.Module:
        """What classes look up."""
        return self.embed_tokens

    def forward(self, *args: Any, **given: Any) -> None:
        """Never returns."""
        self.given = given | {"positional arguments": args or None}
        raise _Reached


class _Embedding(nn.Module):
    def __init__(self, embed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.__dict__["embed"] = embed

    def forward(self, token_id: Tensor) -> Tensor:
        embedded: Tensor = self.__dict__["embed"](token_id.flatten()).unflatten(0, token_id.shape)
        return embedded


def record(base: Any, name: str, embed: Callable[[Tensor], Tensor], **inputs: Any) -> dict[str, Any]:
    """What the text model at `name` is given when the class reads `inputs`. Foreign errors pass through."""
    text, recorder = getattr(base, name), Recorder(base.config.get_text_config(decoder=True), embed)
    setattr(base, name, recorder)
    try:
        base(**inputs)
    except _Reached:
        return recorder.given
    finally:
        setattr(base, name, text)
    raise ModelError("its text model is not run")


def compare(
    given: Mapping[str, Any],
    media: MediaInput,
    embedded_tm: Tensor,
    position_3t: Tensor | None,
    tolerance: float,
) -> str:
    """What a recorded call has that Octavo's would not; "" when nothing is left.

    `embedded_tm`: what Octavo's text model would read. `position_3t`: None for plain positions.
    """
    others = {name: value for name, value in given.items() if value is not None and value is not False}
    found_1tm = others.pop("inputs_embeds", None)
    if not isinstance(found_1tm, Tensor) or found_1tm.shape[1:] != embedded_tm.shape:
        return "its text model is not given embeddings of the prompt's tokens"
    if not torch.allclose(found_1tm[0].float(), embedded_tm.float(), atol=tolerance, rtol=tolerance):
        return "its text model is given other embeddings than those of the encoder and the tokens"
    position = others.pop("position_ids", None)
    if position is not None and not _same_positions(position, position_3t, len(embedded_tm)):
        return "it counts positions in a way of its own"
    if position is None and position_3t is not None:
        return "it counts positions in a way of its own"
    mask = others.pop("attention_mask", None)
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all())):
        return "its text model is given a mask (images that are seen in both directions?)"
    deep = media.deep_features(*embedded_tm.shape)
    if deep is not None and not _same_deep(deep, [others.pop(name, None) for name in DEEP], tolerance):
        return "its encoder adds to layers in a way of its own"
    unknown = sorted(others.keys() - set(NEUTRAL))
    return f"its text model is also given {', '.join(unknown)}" if unknown else ""


def _same_positions(found: Tensor, position_3t: Tensor | None, count: int) -> bool:
    if position_3t is None:
        return torch.equal(found.flatten().cpu(), torch.arange(count))
    return found.ndim == 3 and torch.equal(found[-3:, 0].cpu(), position_3t.cpu())


def _same_deep(deep: tuple[Tensor, list[Tensor]], found: Sequence[Any], tolerance: float) -> bool:
    mask, layers = found
    if not isinstance(mask, Tensor) or not torch.equal(mask.flatten(), deep[0]) or len(layers) != len(deep[1]):
        return False
    pairs = zip(layers, deep[1], strict=True)
    return all(torch.allclose(a.float(), b.float(), atol=tolerance, rtol=tolerance) for a, b in pairs)
