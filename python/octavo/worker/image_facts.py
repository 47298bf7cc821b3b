"""Whether a loaded model takes images, and what their processor must know; families that nobody compared with
Transformers are tried out with two pictures first.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from octavo.config import MediaConfig
from octavo.errors import ModelError
from octavo.models.base import CausalLM
from octavo.multimodal.limits import ImageLimits
from octavo.protocol import ImageFacts

logger = logging.getLogger(__name__)

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def has_processor(folder: Path) -> bool:
    """A checkpoint's folder says how images become tensors."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def image_facts(
    model: CausalLM, folder: Path | None, config: MediaConfig, device: torch.device
) -> tuple[ImageFacts | None, str]:
    """(facts, "") or (None, why not; "" for a model of text)."""
    images = model.images
    if images is None:
        return None, ""
    if folder is None or not has_processor(folder):
        return None, f"its folder has none of {', '.join(PROCESSOR_FILES)}"
    if ImageLimits.of(config).max_images == 0:
        return None, "--limit-mm-per-prompt says so"
    if not images.is_known:
        from octavo.multimodal.processor import ImageProcessor  # seconds

        try:
            trial = ImageProcessor(str(folder), config.max_image_pixels).trial()
            images.try_out(trial.token_ids, trial.inputs, trial.images, device)
        except ModelError as error:
            logger.warning("images are not taken, text is: %s", error)
            return None, str(error)
        logger.info("images are taken: two trial pictures reached the text model as expected")
    return ImageFacts(str(folder), images.is_whole), ""
