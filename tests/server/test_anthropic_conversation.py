"""Content blocks to chat messages: what each becomes, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.server.anthropic.conversation import to_chat


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def use(call_id: str, name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **({"content": content} if content else {}), **more}


def test_texts_and_roles() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [block("b"), block("c")]},
        {"role": "assistant", "content": "d"},
    ]
    assert to_chat([block("s"), block("t")], messages) == [
        {"role": "system", "content": [block("s"), block("t")]},
        {"role": "user", "content": [block("a"), block("b"), block("c")]},
        {"role": "assistant", "content": "d"},
    ]
    assert to_chat(None, messages[:1]) == [{"role": "user", "content": "a"}]


def test_a_round_of_tools() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "?"}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [thinking, redacted, block("b"), use("1", city="é"), use("2", "g")]},
        {
            "role": "user",
            "content": [result("1", "sun"), result("2", [block("x"), block("y")], is_error=True), block("so?")],
        },
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "é"}'}}
    assert to_chat(None, messages)[1:] == [
        {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "hm",
            "tool_calls": [call, {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "sun"},
        {"role": "tool", "tool_call_id": "2", "name": "g", "content": [block("Error: x"), block("y")]},
        {"role": "user", "content": "so?"},
    ]


def test_results_without_content() -> None:
    messages = [
        {"role": "assistant", "content": [use("1"), use("2")]},
        {"role": "user", "content": [result("1"), result("2", is_error=True)]},
    ]
    assert [message["content"] for message in to_chat(None, messages)] == ["", "", "Error"]


def test_documents_of_plain_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    content = [{"type": "document", "source": source, "title": "head"}]
    assert to_chat(None, [{"role": "user", "content": content}]) == [{"role": "user", "content": "head\nbody"}]
    with pytest.raises(RequestError, match=r"messages\.0\.content\.0: .*only text and images"):
        to_chat(None, [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}])


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([("assistant", [use("1")]), ("user", "x")], "without a tool_result"),
        ([("assistant", [use("1")]), ("user", "x"), ("assistant", "y")], "messages.2: tool_use ids without"),
        ([("user", [])], "messages.0.content must not be empty"),
        ([("assistant", [use("1"), use("1")])], "must be unique"),
        ([("assistant", [use("1")]), ("user", [result("1"), result("1")])], "no tool_use"),
        ([("assistant", [result("1")])], "'tool_result' blocks are not known"),
        ([("user", [use("1")])], "'tool_use' blocks are not known"),
        ([("assistant", [{**use("1"), "input": []}])], "input must be an object"),
        ([("assistant", [{"type": "thinking"}])], "thinking must be a string"),
    ],
)
def test_what_is_refused(turns: list[tuple[str, Any]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        to_chat(None, [{"role": role, "content": content} for role, content in turns])
