"""A prompt's images where they belong: placeholders become the tokens that stand for an image, and what the worker
needs of each travels as bytes beside the token ids. Imports no torch: the API process and the worker both use it.

The bytes: u32 count, then of each image u32 start, u32 length, 16 bytes digest, u32 size, and `ProcessedImage.data`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.errors import RequestError

_HEAD = struct.Struct("<II16sI")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """One image as the model's processor made it."""

    token_ids: tuple[int, ...]
    """What stands for it in the prompt, in the place of one placeholder."""
    digest: bytes
    """16 bytes, of everything below and of the tokens: equal digests mean equal inputs of the model."""
    data: bytes
    """The tensors that the encoder reads, as safetensors."""


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """The images of one prompt, in order."""

    spans: tuple[tuple[int, int, int, bool], ...] = ()
    """(first position, tokens, digest as a number, whether a step must compute it whole) of each."""
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class MediaRecord:
    """One image as the worker reads it: tokens [start, start + length) of the prompt stand for it."""

    start: int
    length: int
    digest: bytes
    data: bytes


NO_MEDIA = PlacedMedia()


def place(
    token_ids: Sequence[int], placeholder_id: int, images: Sequence[ProcessedImage], *, is_whole: bool
) -> tuple[list[int], PlacedMedia]:
    """The prompt with every placeholder replaced by its image's tokens, and the images' places. RequestError when there
    are not as many placeholders as images."""
    places = [i for i, token_id in enumerate(token_ids) if token_id == placeholder_id]
    if len(places) != len(images):
        raise RequestError(
            f"the prompt has places for {len(places)} images, and {len(images)} were given: "
            "write the model's image token once for each (a chat template does it by itself)",
            "prompt",
        )
    out: list[int] = []
    spans, packed, at = [], [_COUNT.pack(len(images))], 0
    for where, image in zip(places, images, strict=True):
        out += token_ids[at:where]
        length = len(image.token_ids)
        spans.append((len(out), length, int.from_bytes(image.digest, "little"), is_whole))
        packed += [_HEAD.pack(len(out), length, image.digest, len(image.data)), image.data]
        out += image.token_ids
        at = where + 1
    out += token_ids[at:]
    return out, PlacedMedia(tuple(spans), b"".join(packed))


def unpack(data: bytes) -> Iterator[MediaRecord]:
    """What `place` packed."""
    (count,) = _COUNT.unpack_from(data)
    at = _COUNT.size
    for _ in range(count):
        start, length, digest, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        yield MediaRecord(start, length, digest, data[at : at + size])
        at += size
