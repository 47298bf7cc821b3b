"""Pillow's images in any mode to RGB, the way people see them: what is transparent lies on white, and 16-bit grey keeps
its shades. (Pillow's own conversion shows hidden colours, and all shades from 255 on as white.)

Pillow is imported by whoever has an image.
"""

from __future__ import annotations

from typing import Any

WHITE = (255, 255, 255)


def as_rgb(image: Any) -> Any:
    """A Pillow image in RGB."""
    if image.mode.startswith("I"):  # 16 bits of grey, whatever their order
        return image.convert("I").point(lambda shade: shade * (1 / 256)).convert("L").convert("RGB")
    if image.has_transparency_data:
        from PIL import Image

        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, (*WHITE, 255)), seen).convert("RGB")
    return image.convert("RGB")
