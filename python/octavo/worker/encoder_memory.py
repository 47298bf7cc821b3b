"""What images take on the device beside their tokens: the encoder's weights, its work on the largest picture that is
taken, and the outputs that a step reads (those that are kept lie in blocks of the KV cache). Worked out before anything
is allocated: the checkpoint's processor makes tensors of such a picture, which a copy of the encoder without memory
reads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.config import MediaConfig
from octavo.errors import ModelError
from octavo.models.image_memory import count_encoding, estimate
from octavo.models.images import num_values
from octavo.worker.image_facts import has_processor

if TYPE_CHECKING:
    from octavo.models.images import ImageEncoder

logger = logging.getLogger(__name__)

MIN_VALUES = 8 * 3 * 448 * 448
"""Where pictures are small, so many numbers of several are encoded together: 8 of 448 pixels square."""
RATIOS = (1.0, 2.0, 0.5, 3.0, 1 / 3, 4.0, 0.25, 8.0, 0.125)
"""Width by height of the pictures among which the largest is looked for."""


@dataclass(frozen=True, slots=True)
class EncoderUsage:
    """Of one encoder."""

    weight_bytes: int
    """Contained in the model's."""
    work_bytes: int
    """Its peak beside weights and outputs of other images."""
    picture: tuple[int, int]
    """Width and height of the largest one that is taken."""
    num_tokens: int
    """That stand for it in a prompt."""
    token_bytes: int
    """Of outputs for a token."""
    num_values: int
    """Numbers that the encoder reads at a time, of however many pictures; `work_bytes` are for these."""
    is_counted: bool
    """`work_bytes` is counted, not estimated from sizes."""

    def output_bytes(self, num_tokens: int) -> int:
        """Of all outputs that a step of so many tokens reads, when its last image is cut."""
        return (num_tokens + self.num_tokens) * self.token_bytes


def encoder_usage(images: ImageEncoder, folder: Path | None, config: MediaConfig) -> EncoderUsage | None:
    """Of an encoder on the meta device, which is of no use afterwards. None: the folder has no processor that works
    (images are then refused)."""
    if folder is None or not has_processor(folder):
        return None
    from octavo.multimodal.processor import ImageProcessor  # seconds

    try:
        processor = ImageProcessor(str(folder), config.max_image_pixels)
        picture = processor.largest(config.max_image_pixels, RATIOS)
        token_ids, tensors = processor.of_size(picture)
    except ModelError as error:
        logger.info("the encoder's memory is not planned: %s", error)
        return None
    meta, weight_bytes = torch.device("meta"), images.weight_bytes()
    work_bytes = count_encoding(images.base, lambda: images.encode(tensors, meta, keep_host=True))
    is_counted = work_bytes is not None
    if work_bytes is None:
        item = torch.empty((), dtype=images.dtype).element_size()
        vision = getattr(images.base.config, "vision_config", None)
        work_bytes = estimate(vision, tensors, item)
    values = num_values(tensors)
    num_together = max(values, MIN_VALUES)
    return EncoderUsage(
        weight_bytes=weight_bytes,
        work_bytes=math.ceil((work_bytes + input_bytes(tensors)) * num_together / values),
        picture=picture,
        num_tokens=len(token_ids),
        token_bytes=images.width * images.dtype.itemsize,
        num_values=num_together,
        is_counted=is_counted,
    )


def input_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Of the tensors as the processor made them."""
    return sum(x.nbytes for x in tensors.values())
