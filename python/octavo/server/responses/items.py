"""Items of the Responses API as OpenAI chat messages, which chat templates take.

Reasoning, text and calls that follow each other are one turn of the assistant. Not here: checks of whole bodies
(schema/responses.py).
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.errors import RequestError

Item = Mapping[str, Any]

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
STATUS_TYPES = ("message", "function_call", "function_call_output")


def new_id(kind: str) -> str:
    """An id for an item of a type."""
    return f"{ID_PREFIXES.get(kind, 'item')}_{secrets.token_hex(16)}"


def normal_items(given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The input as a list of items with types and ids; their content is not checked yet."""
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    out = []
    for i, item in enumerate(given):
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference"
        if not isinstance(kind, str) or kind not in READERS:
            raise _unknown(kind, f"input[{i}]")
        status = {"status": "completed"} if kind in STATUS_TYPES else {}
        own_id = item.get("id")
        out.append({**status, **item, "type": kind, "id": own_id if isinstance(own_id, str) else new_id(kind)})
    return out


def _unknown(kind: object, where: str) -> RequestError:
    if kind == "item_reference":
        return RequestError(f"{where}: item references are not followed: send the item", param="input")
    return RequestError(f"{where}.type: items of type {str(kind)[:60]!r} are not taken here", param="input")


def to_chat(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The conversation for a chat template. `RequestError` names the item at fault."""
    messages: list[dict[str, Any]] = []
    reader = _Reader(messages)
    for i, item in enumerate(items):
        reader.read(item, f"input[{i}]")
    reader.end()
    return _with_instructions(instructions, messages)


def _with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions and what the conversation begins with in their role, as one message: templates take no second."""
    role = messages[0]["role"] if messages and messages[0]["role"] in ("system", "developer") else "system"
    num_own = next((i for i, message in enumerate(messages) if message["role"] != role), len(messages))
    texts = [instructions] if instructions else []
    for message in messages[:num_own]:
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part["text"] for part in content]
    own = [{"role": role, "content": _joined(texts)}] if texts else []
    return [*own, *messages[num_own:]]


def _string(item: Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{key} must be a string", param="input")
    return value


def _texts(content: object, where: str) -> list[str]:
    """Texts of a message's content or of a call's output."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts", param="input")
    out = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in TEXT_PARTS:
            out.append(_string(part, "text", f"{where}[{i}]"))
        elif kind == "refusal":
            out.append(_string(part, "refusal", f"{where}[{i}]"))
        else:
            raise RequestError(
                f"{where}[{i}]: this model reads text only, not {str(kind)[:40]!r} parts",
                param="input",
                code="unsupported",
            )
    return out


def _parts(content: object, where: str) -> list[str | dict[str, Any]]:
    """Texts and images of a user's message, in order."""
    if not isinstance(content, list):
        return list(_texts(content, where))
    out: list[str | dict[str, Any]] = []
    for i, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") in ("input_image", "image_url"):
            out.append({**part, "where": f"{where}[{i}]"})
        else:
            out += _texts([part], where)
    return out


def _joined(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """One text as it is; several, and images, as parts, which each template joins in its own way."""
    if len(parts) < 2 and all(isinstance(part, str) for part in parts):
        return "".join(str(part) for part in parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def sealed(reasoning: str) -> str:
    """`encrypted_content` of a reasoning item: opaque to clients, and enough to go on with."""
    return base64.b64encode(reasoning.encode()).decode()


def _unsealed(value: object) -> str:
    if not isinstance(value, str):
        return ""
    try:
        return base64.b64decode(value, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""  # another server's, which nobody else can read


def _object_text(arguments: str) -> str:
    """Arguments as templates need them; what is no JSON object (such a call has failed) is wrapped in one."""
    try:
        is_object = isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    return (arguments or "{}") if is_object else json.dumps({"arguments": arguments})


def _error_text(error: object) -> str:
    """What an `mcp_call`'s error says."""
    if not isinstance(error, Mapping):
        return str(error or "no output")
    content = error.get("content")
    parts = content if isinstance(content, list) else []
    texts = [str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part]
    return "\n".join(texts) or str(error.get("message") or error.get("type"))


class _Reader:
    """Reads items in order; the assistant's own are gathered into one message."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._names: dict[str, str] = {}
        """Call id -> the tool's name."""
        self._requested: dict[str, Item] = {}
        """Approval requests by id."""
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def read(self, item: Item, where: str) -> None:
        READERS[item["type"]](self, item, where)

    def end(self) -> None:
        """Write the assistant's turn that has been gathered."""
        if not (self._texts or self._thoughts or self._calls):
            return
        message: dict[str, Any] = {"role": "assistant", "content": _joined(self._texts)}
        if self._thoughts:
            message["reasoning_content"] = "\n".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        self._messages.append(message)
        self._texts, self._thoughts, self._calls = [], [], []

    def message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", param="input")
        if role == "assistant":
            self._texts += _texts(item.get("content"), f"{where}.content")
            return
        self.end()
        read = _parts if role == "user" else _texts
        parts = list(read(item.get("content"), f"{where}.content"))
        self._messages.append({"role": role, "content": _joined(parts)})

    def reasoning(self, item: Item, where: str) -> None:
        if self._texts or self._calls:
            self.end()
        texts = _texts(item.get("content") or [], f"{where}.content")
        text = "".join(texts) or _unsealed(item.get("encrypted_content"))
        text = text or "\n".join(_texts(item.get("summary") or [], f"{where}.summary"))
        if text:
            self._thoughts.append(text)

    def function_call(self, item: Item, where: str) -> None:
        call_id, name = _string(item, "call_id", where), _string(item, "name", where)
        self._call(call_id, name, _string(item, "arguments", where), where)

    def custom_tool_call(self, item: Item, where: str) -> None:
        """The model wrote its text as the one argument of a function."""
        call_id, name = _string(item, "call_id", where), _string(item, "name", where)
        self._call(call_id, name, json.dumps({"input": _string(item, "input", where)}, ensure_ascii=False), where)

    def function_call_output(self, item: Item, where: str) -> None:
        call_id = _string(item, "call_id", where)
        if call_id not in self._names:
            raise RequestError(f"{where}.call_id: no call with the id {call_id[:80]!r} comes before it", param="input")
        self._result(call_id, _joined(_texts(item.get("output"), f"{where}.output")))

    def mcp_call(self, item: Item, where: str) -> None:
        """A call that a server made and its result."""
        call_id, name = _string(item, "id", where), _string(item, "name", where)
        self._call(call_id, name, _object_text(_string(item, "arguments", where)), where)
        output, error = item.get("output"), item.get("error")
        self._result(call_id, output if isinstance(output, str) else f"Error: {_error_text(error)}")

    def approval_request(self, item: Item, where: str) -> None:
        """A call that waits for the user's word; an approved one is an `mcp_call` later."""
        self._requested[_string(item, "id", where)] = item

    def approval_response(self, item: Item, where: str) -> None:
        """The user's word; a refused call is told to the model as a failed one."""
        call_id = _string(item, "approval_request_id", where)
        asked = self._requested.get(call_id)
        if asked is None:
            raise RequestError(f"{where}: no mcp_approval_request has the id {call_id[:80]!r}", param="input")
        if item.get("approve") is not True:
            arguments = _object_text(_string(asked, "arguments", where))
            self._call(call_id, _string(asked, "name", where), arguments, where)
            reason = item.get("reason")
            self._result(call_id, "Error: the user refused this call" + (f": {reason}" if reason else ""))

    def nothing(self, item: Item, where: str) -> None:
        """What tools there are is told by the request."""

    def _call(self, call_id: str, name: str, arguments: str, where: str) -> None:
        if call_id in self._names:
            raise RequestError(f"{where}: the call id {call_id[:80]!r} comes twice", param="input")
        self._names[call_id] = name
        function = {"name": name, "arguments": arguments}
        self._calls.append({"id": call_id, "type": "function", "function": function})

    def _result(self, call_id: str, content: str | list[dict[str, Any]]) -> None:
        self.end()
        name = self._names[call_id]
        self._messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": content})


READERS: dict[str, Callable[[_Reader, Item, str], None]] = {
    "message": _Reader.message,
    "reasoning": _Reader.reasoning,
    "function_call": _Reader.function_call,
    "function_call_output": _Reader.function_call_output,
    "custom_tool_call": _Reader.custom_tool_call,
    "custom_tool_call_output": _Reader.function_call_output,
    "mcp_call": _Reader.mcp_call,
    "mcp_list_tools": _Reader.nothing,
    "mcp_approval_request": _Reader.approval_request,
    "mcp_approval_response": _Reader.approval_response,
}
