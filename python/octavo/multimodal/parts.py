"""Finds the images in chat messages: content parts of the OpenAI chat and Responses forms, and of Python callers.

What remains of each is {"type": "image"}, which chat templates know. Not here: Anthropic's blocks, which are brought
into this form first (server/anthropic/conversation.py), and fetching (fetch.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import RequestError
from octavo.multimodal.sources import ImageSource, UrlImage, from_object, from_url

IMAGE_PARTS = ("image_url", "input_image", "image", "image_pil")
"""Types of parts that hold an image."""
OTHER_PARTS = ("input_audio", "audio_url", "audio", "video_url", "video", "input_video")
IMAGE = {"type": "image"}

Message = Mapping[str, Any]
Found = ImageSource | UrlImage


def has_images(messages: object) -> bool:
    """Cheap: some part of some message is of a kind that holds an image."""
    if not isinstance(messages, Sequence):
        return False
    return any(
        isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def first_image(messages: Sequence[Message]) -> str:
    """The place of the first image of messages that have one."""
    return next(
        _where(part, i, j)
        for i, message in enumerate(messages)
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for j, part in enumerate(message["content"])
        if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS
    )


def _where(part: Mapping[str, Any], i: int, j: int) -> str:
    """The part's place in the request, for messages: parts that were brought into this form have it with them."""
    where = part.get("where")
    return where if isinstance(where, str) else f"messages[{i}].content[{j}]"


def take_images(messages: Sequence[Message], max_bytes: int) -> tuple[list[Message], list[Found]]:
    """The messages with plain image parts, and the images in their order. RequestError names the part at fault."""
    out: list[Message] = []
    images: list[Found] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            out.append(message)
            continue
        parts = []
        for j, part in enumerate(content):
            where = f"messages[{i}].content[{j}]"
            if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
                images.append(_image(part, _where(part, i, j), max_bytes))
                part = IMAGE
            elif isinstance(part, Mapping) and part.get("type") in OTHER_PARTS:
                raise RequestError(
                    f"{where}: {part['type']} parts are not taken, only text and images", f"{where}.type"
                )
            parts.append(part)
        out.append({**message, "content": parts})
    return out, images


def _image(part: Mapping[str, Any], where: str, max_bytes: int) -> Found:
    kind = part["type"]
    if kind == "image_pil" or (kind == "image" and "image" in part):
        return from_object(part.get("image", part.get("image_pil")), f"{where}.image", max_bytes)
    if kind == "input_image" and part.get("file_id") is not None:
        raise RequestError(
            f"{where}.file_id: images of uploaded files are not taken; use image_url", f"{where}.file_id"
        )
    value = part.get("url") if kind == "image" else part.get("image_url")
    if isinstance(value, Mapping):
        where, value = f"{where}.image_url", value.get("url")
        return from_url(value, f"{where}.url", max_bytes)
    return from_url(value, f"{where}.{'url' if kind == 'image' else 'image_url'}", max_bytes)
