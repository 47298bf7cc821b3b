"""Image files to pixels, with Pillow, under limits: sizes are looked at before anything is unpacked.

Runs in the processor's process only: whatever a file does to a decoder happens there.
"""

from __future__ import annotations

import io
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

from octavo.errors import RequestError
from octavo.multimodal.rgb import as_rgb
from octavo.multimodal.sources import FileImage, ImageSource, PixelImage

MAX_RATIO = 200
"""Of an image's sides: processors scale the shorter one up to the model's size, and the other with it."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decode(source: ImageSource, max_pixels: int) -> Image.Image:
    """The image in RGB, turned as its metadata says; the first frame of several. RequestError names the source's place
    in the request."""
    if isinstance(source, PixelImage):
        _check_size(source.size, max_pixels, source.where)
        return Image.frombytes("RGB", source.size, source.data)
    return _decode_file(source, max_pixels)


def _decode_file(source: FileImage, max_pixels: int) -> Image.Image:
    where = source.where
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `max_pixels` is the rule
            image = Image.open(io.BytesIO(source.data), formats=FORMATS)
            _check_size(image.size, max_pixels, where)
            image.load()
            rgb: Image.Image = as_rgb(ImageOps.exif_transpose(image))
            return rgb
    except UnidentifiedImageError:
        message = f"{where}: this is no image in a format that is taken ({', '.join(FORMATS)})"
        raise RequestError(message, where) from None
    except Image.DecompressionBombError:  # Pillow's own bound, met while the file is opened
        message = f"{where}: the image has more than {max_pixels} pixels; no more are taken (--max-image-pixels)"
        raise RequestError(message, where) from None
    except RequestError:
        raise
    except Exception as error:  # decoders raise all sorts of errors for broken files
        raise RequestError(f"{where}: the image can't be decoded: {str(error)[:200]}", where) from None


def _check_size(size: tuple[int, int], max_pixels: int, where: str) -> None:
    width, height = size
    if width * height > max_pixels:
        raise RequestError(
            f"{where}: the image has {width} x {height} pixels; at most {max_pixels} are taken (--max-image-pixels)",
            where,
        )
    if max(size) > MAX_RATIO * min(size):
        raise RequestError(
            f"{where}: the image has {width} x {height} pixels; no side may be more than {MAX_RATIO} times the other",
            where,
        )
