"""Images as callers give them, before anybody has looked into them: a file's bytes, or pixels.

Not here: where they are in a request (parts.py), fetching (fetch.py), decoding (decode.py). Imports neither Pillow nor
torch.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError
from octavo.multimodal.rgb import as_rgb

_DATA_URL = re.compile(r"data:([\w.+/-]*)((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.ASCII)


@dataclass(frozen=True, slots=True)
class FileImage:
    """An image file's bytes, and its place in the request, for messages."""

    data: bytes
    where: str


@dataclass(frozen=True, slots=True)
class PixelImage:
    """RGB bytes, row by row from the top."""

    size: tuple[int, int]
    """Width, height."""
    data: bytes
    where: str


@dataclass(frozen=True, slots=True)
class UrlImage:
    """An http(s) address that has yet to be fetched."""

    url: str
    where: str


ImageSource = FileImage | PixelImage


def from_url(url: object, where: str, max_bytes: int) -> FileImage | UrlImage:
    """A data URL's bytes, or an address. RequestError for what is neither, and for too large a file."""
    if not isinstance(url, str) or not url:
        raise RequestError(f"{where} must be a URL: data:image/…;base64,… or http(s)", where)
    if url[:5].lower() == "data:":
        return _from_data_url(url, where, max_bytes)
    if url.lower().startswith(("http://", "https://")):
        return UrlImage(url, where)
    scheme = url.split(":", 1)[0][:20]
    raise RequestError(f"{where}: {scheme!r} addresses are not taken; use a data URL or http(s)", where)


def _from_data_url(url: str, where: str, max_bytes: int) -> FileImage:
    match = _DATA_URL.match(url)
    if match is None or match.group(3) is None:
        raise RequestError(f"{where}: a data URL must look like data:image/png;base64,…", where)
    kind = match.group(1).lower()
    if kind and not kind.startswith("image/"):
        raise RequestError(f"{where}: the data URL holds {kind[:40]!r}, not an image", where)
    return from_base64(url[match.end() :], where, max_bytes)


def from_base64(text: object, where: str, max_bytes: int) -> FileImage:
    """RequestError for text that is no base64, and for too large a file."""
    if not isinstance(text, str):
        raise RequestError(f"{where} must be a string", where)
    if len(text) // 4 * 3 > max_bytes + 3:
        raise too_large(where, max_bytes)
    try:
        data = base64.b64decode(re.sub(r"[ \r\n]", "", text), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{where}: the image's data is not base64", where) from None
    if not data:
        raise RequestError(f"{where}: the image is empty", where)
    if len(data) > max_bytes:
        raise too_large(where, max_bytes)
    return FileImage(data, where)


def too_large(where: str, max_bytes: int) -> RequestError:
    return RequestError(f"{where}: the image's file has more than {max_bytes} bytes (--max-image-bytes)", where)


def from_object(value: Any, where: str, max_bytes: int) -> ImageSource:
    """From what Python callers give: a PIL image, or a file's bytes."""
    if isinstance(value, bytes | bytearray):
        if len(value) > max_bytes:
            raise too_large(where, max_bytes)
        return FileImage(bytes(value), where)
    if hasattr(value, "convert") and hasattr(value, "has_transparency_data"):
        image = as_rgb(value)
        return PixelImage(image.size, image.tobytes(), where)
    raise RequestError(f"{where} must be a PIL image or the bytes of an image file, not {type(value).__name__}", where)
