"""What a request's images may be, from the options `--limit-mm-per-prompt`, `--max-image-bytes` and their like."""

from __future__ import annotations

import json
from dataclasses import dataclass

from octavo.config import MediaConfig
from octavo.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The limits of one prompt's images."""

    max_images: int
    max_bytes: int
    """Of an image's file."""
    max_pixels: int
    timeout_s: float
    """For fetching, and for processing, one image."""

    @classmethod
    def of(cls, config: MediaConfig) -> ImageLimits:
        """ConfigError: `limit_mm_per_prompt` is not what it should be."""
        return cls(
            _max_images(config.limit_mm_per_prompt),
            config.max_image_bytes,
            config.max_image_pixels,
            config.media_timeout_s,
        )

    def check_count(self, count: int, param: str) -> None:
        """RequestError for more images than a prompt may have."""
        if count > self.max_images:
            raise RequestError(
                f"{param}: the request has {count} images; this server takes {self.max_images} a prompt "
                "(--limit-mm-per-prompt)",
                param,
            )


def _max_images(text: str) -> int:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict) or set(values) - {"image", "video", "audio"}:
        raise ConfigError(f'--limit-mm-per-prompt: {text!r} is not JSON like {{"image": 4}}', "limit_mm_per_prompt")
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"--limit-mm-per-prompt: {name} must be a number from 0 on", "limit_mm_per_prompt")
        if name != "image" and value:
            raise ConfigError(f"--limit-mm-per-prompt: {name} inputs are not taken; use 0", "limit_mm_per_prompt")
    return int(values.get("image", 16))
