"""Images of every mode as people see them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from tiny_images import picture

from octavo.multimodal.decode import decode
from octavo.multimodal.rgb import as_rgb
from octavo.multimodal.sources import FileImage, PixelImage, from_object

LIMIT = 10**6


def from_file(image: Image.Image, kind: str = "PNG", **options: object) -> Image.Image:
    """Through a file, as it is decoded."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return decode(FileImage(file.getvalue(), "here"), LIMIT)


def test_sixteen_bits_of_grey_keep_their_shades() -> None:
    shades = (np.arange(2400, dtype=np.uint16) * 27).reshape(40, 60)
    image = Image.fromarray(shades)
    for found in (from_file(image), as_rgb(image), as_rgb(image.convert("I"))):
        assert found.mode == "RGB"
        assert (np.asarray(found)[..., 0] == shades >> 8).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_lies_on_white(mode: str) -> None:
    clear = Image.new(mode, (4, 4), {"RGBA": (0, 0, 0, 0), "LA": (0, 0), "P": 0}[mode])
    options = {"transparency": 0} if mode == "P" else {}
    assert from_file(clear, **options).getpixel((1, 1)) == (255, 255, 255)
    full = picture(1).convert(mode) if mode != "P" else picture(1).convert("P")
    assert from_file(full).tobytes() == picture(1).convert(mode).convert("RGB").tobytes()


def test_half_transparent_colours_are_mixed() -> None:
    half = as_rgb(Image.new("RGBA", (2, 2), (0, 100, 200, 128))).getpixel((0, 0))
    assert all(abs(a - b) <= 1 for a, b in zip(half, (127, 177, 227), strict=True))


@pytest.mark.parametrize("mode", ["CMYK", "L", "1", "YCbCr"])
def test_other_modes_are_converted(mode: str) -> None:
    image = picture(2).convert(mode)
    kind = "PNG" if mode in ("L", "1") else "JPEG"
    found = from_file(image, kind)
    assert (found.mode, found.size) == ("RGB", image.size)
    if kind == "PNG":
        assert found.tobytes() == image.convert("RGB").tobytes()


def test_moving_pictures_show_their_first_frame() -> None:
    frames = [picture(seed).convert("P") for seed in range(3)]
    still, moving = (
        from_file(frames[0], "GIF"),
        from_file(frames[0], "GIF", save_all=True, append_images=frames[1:]),
    )
    assert still.tobytes() == moving.tobytes()


def test_pictures_of_python_are_read_as_files_are() -> None:
    clear = Image.new("RGBA", (3, 2), (0, 0, 0, 0))
    found = from_object(clear, "a", LIMIT)
    assert isinstance(found, PixelImage)
    assert found.data == b"\xff" * 18
