"""Anthropic's messages of content blocks as OpenAI chat messages, which chat templates take.

Tool results become `tool` messages, thinking blocks `reasoning_content`; signatures are opaque and not checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.errors import RequestError

Block = Mapping[str, Any]
Message = Mapping[str, Any]

NO_FILES = "document files are not taken, only text and images"
NO_IMAGES = "images are taken in messages of the user only"
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def to_chat(system: str | list[dict[str, Any]] | None, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation for a chat template. `RequestError` names the block at fault ("messages.1.content.0")."""
    out: list[dict[str, Any]] = []
    if system:
        blocks = _blocks(system, "system")
        out.append(
            {"role": "system", "content": _joined([_text(block, f"system.{i}") for i, block in enumerate(blocks)])}
        )
    reader = _Reader(out)
    for i, message in enumerate(messages):
        reader.read(message, f"messages.{i}")
    reader.end()
    return out


def _blocks(content: object, where: str) -> Sequence[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{where} must be a string or a list of content blocks", param=where)
    return content


def _string(block: Block, key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{key} must be a string", param=f"{where}.{key}")
    return value


def _text(block: Block, where: str) -> str:
    """The text of a block that holds text only."""
    kind = block.get("type")
    if kind == "text":
        return _string(block, "text", where)
    if kind == "document":
        source = block.get("source")
        if isinstance(source, Mapping) and source.get("type") == "text":
            parts = [block.get("title"), block.get("context"), _string(source, "data", f"{where}.source")]
            return "\n".join(part for part in parts if isinstance(part, str) and part)
    if kind in ("image", "document"):
        reason = NO_IMAGES if kind == "image" else NO_FILES
        raise RequestError(f"{where}: {reason}", param=f"{where}.type", code="unsupported")
    raise RequestError(f"{where}.type: {str(kind)[:60]!r} blocks are not known here", param=f"{where}.type")


def _image(block: Block, where: str) -> dict[str, Any]:
    """An image block as a part of a chat message."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("base64", "url"):
        raise RequestError(f"{where}.source.type must be base64 or url", param=f"{where}.source.type")
    if kind == "url":
        url = _string(source, "url", f"{where}.source")
    else:
        media_type = source.get("media_type")
        if media_type not in IMAGE_TYPES:
            where = f"{where}.source.media_type"
            raise RequestError(f"{where} must be one of {', '.join(IMAGE_TYPES)}", param=where)
        url = f"data:{media_type};base64,{_string(source, 'data', f'{where}.source')}"
    return {"type": "image_url", "image_url": url, "where": where}


def _joined(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """One text as it is; several, and images, as parts, which each template joins in its own way."""
    if len(parts) < 2 and all(isinstance(part, str) for part in parts):
        return "".join(str(part) for part in parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


class _Reader:
    """Reads messages in order; turns of one role that follow each other become one."""

    def __init__(self, out: list[dict[str, Any]]) -> None:
        self._out = out
        self._names: dict[str, str] = {}
        """Tool call id -> the tool's name."""
        self._open: set[str] = set()
        """Calls of the last assistant turn that have no result yet."""
        self._role = ""
        self._texts: list[str | dict[str, Any]] = []
        """And images."""
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def read(self, message: Message, where: str) -> None:
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{where}.role must be user or assistant", param=f"{where}.role")
        if role != self._role:
            self._flush()
            if role == "assistant":
                self._check_answered(where)
            self._role = role
        readers: dict[str, Callable[[Block, str], None]] = (
            {"tool_use": self._tool_use, "thinking": self._thinking, "redacted_thinking": self._redacted}
            if role == "assistant"
            else {"tool_result": self._tool_result, **({"image": self._image} if role == "user" else {})}
        )
        blocks = _blocks(message.get("content"), f"{where}.content")
        if not blocks and role == "user":
            raise RequestError(f"{where}.content must not be empty", param=f"{where}.content")
        for i, block in enumerate(blocks):
            path = f"{where}.content.{i}"
            read = readers.get(str(block.get("type")))
            if read is not None:
                read(block, path)
            else:
                self._texts.append(_text(block, path))

    def end(self) -> None:
        self._flush()
        self._check_answered("messages")

    def _image(self, block: Block, where: str) -> None:
        self._texts.append(_image(block, where))

    def _thinking(self, block: Block, where: str) -> None:
        self._thoughts.append(_string(block, "thinking", where))

    def _redacted(self, block: Block, where: str) -> None:
        """Opaque to everybody but its maker."""

    def _tool_use(self, block: Block, where: str) -> None:
        call_id, name = _string(block, "id", where), _string(block, "name", where)
        value = block.get("input")
        if not isinstance(value, dict):
            raise RequestError(f"{where}.input must be an object", param=f"{where}.input")
        if call_id in self._names:
            raise RequestError(f"{where}.id: tool_use ids must be unique", param=f"{where}.id")
        self._names[call_id] = name
        self._open.add(call_id)
        function = {"name": name, "arguments": json.dumps(value, ensure_ascii=False)}
        self._calls.append({"id": call_id, "type": "function", "function": function})

    def _tool_result(self, block: Block, where: str) -> None:
        call_id = _string(block, "tool_use_id", where)
        if call_id not in self._open:
            raise RequestError(
                f"{where}.tool_use_id: {call_id[:80]!r} is no tool_use of the turn before",
                param=f"{where}.tool_use_id",
            )
        self._open.discard(call_id)
        blocks = _blocks(block.get("content") or [], f"{where}.content")
        texts = [_text(inner, f"{where}.content.{i}") for i, inner in enumerate(blocks)]
        if block.get("is_error") is True:
            texts[:1] = [f"Error: {texts[0]}" if texts else "Error"]
        self._flush()
        name = self._names[call_id]
        self._out.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": _joined(texts)})

    def _flush(self) -> None:
        """Write the turn that has been read so far."""
        message: dict[str, Any] = {"role": self._role, "content": _joined(self._texts)}
        if self._thoughts:
            message["reasoning_content"] = "\n".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        if self._texts or self._thoughts or self._calls:
            self._out.append(message)
        self._texts, self._thoughts, self._calls = [], [], []

    def _check_answered(self, where: str) -> None:
        if self._open:
            missing = ", ".join(sorted(self._open))[:200]
            raise RequestError(
                f"{where}: tool_use ids without a tool_result in the message after them: {missing}", param=where
            )
