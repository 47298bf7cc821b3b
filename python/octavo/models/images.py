"""The image side of a Transformers image-text class: pixels to embeddings, and positions in three dimensions.

Not here:
which families are taken (image_families.py), the processor that makes tensors of pixels (multimodal/processor.py), and
where embeddings go (attention/media.py).

Shape suffixes: i tokens that stand for an image, p positions of a prompt, m model dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.models.config import NormalConfig
from octavo.models.image_families import IMAGE_FAMILIES


class ImageEncoder:
    """Runs what of a Transformers image-text model is not its text model. The module belongs to somebody else.

    Attributes:
        token_id: The token that stands for one output of the encoder.
        is_whole: An image's tokens attend to each other in both directions.
        numbers_positions: Rotations go by time, height and width.
    """

    def __init__(self, base: Any, raw: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._base = base
        self._dtype = dtype
        self._names = inspect.signature(self._base.get_image_features).parameters
        self.token_id = int(self._base.config.image_token_id)
        self.is_whole = IMAGE_FAMILIES[raw["model_type"]]
        self.numbers_positions = hasattr(base, "get_rope_index")

    @torch.inference_mode()
    def encode(self, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """One image's embeddings [i, m]. Deep features (Qwen3-VL), if there are any, follow: [i, m * (1 + layers)]."""
        options = {name: self._placed(x, device) for name, x in tensors.items() if name in self._names}
        output = self._base.get_image_features(**options)
        parts = [_joined(output.pooler_output)]
        parts += [_joined(layer) for layer in getattr(output, "deepstack_features", None) or ()]
        return torch.cat(parts, dim=-1).to(self._dtype)

    def _placed(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.to(device, self._dtype if tensor.is_floating_point() else tensor.dtype)

    def positions(
        self, token_id_p: Tensor, is_image_p: Tensor, images: Sequence[Mapping[str, Tensor]]
    ) -> tuple[Tensor, int]:
        """Positions [3, p] of a sequence whose prompt has these images, and how far later positions are from plain
        ones."""
        grid = torch.cat([image["image_grid_thw"] for image in images])
        position_31p, shift = self._base.get_rope_index(
            input_ids=token_id_p.unsqueeze(0), mm_token_type_ids=is_image_p.int().unsqueeze(0), image_grid_thw=grid
        )
        return position_31p[:, 0], int(shift)


def image_encoder(
    base: Any, config: NormalConfig, dtype: torch.dtype, attentions: Collection[nn.Module]
) -> ImageEncoder | None:
    """Of the model under a Transformers class's head, whose decoder has these attention modules; None where images are
    not taken."""
    if config.raw.get("model_type") not in IMAGE_FAMILIES or not hasattr(base, "get_image_features"):
        return None
    for part in base.children():
        if not any(module in attentions for module in part.modules()):
            _attend_by_itself(part)
    return ImageEncoder(base, config.raw, dtype)


def _attend_by_itself(part: nn.Module) -> None:
    """An encoder's attention has no cache: PyTorch's own runs it, not the one that the decoder's was replaced with."""
    for module in part.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation") and not hasattr(config, "text_config"):  # the whole's: it passes on
            config._attn_implementation = "sdpa"


def _joined(output: Any) -> Tensor:
    """[i, m] from one tensor, or from one an image."""
    if isinstance(output, Tensor):
        return output.flatten(0, -2)
    return torch.cat([part.flatten(0, -2) for part in output])
