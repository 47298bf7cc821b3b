"""Items of the Responses API to chat messages: what each becomes, and in which order."""

from __future__ import annotations

from typing import Any

from octavo.server.responses.items import normal_items, sealed, to_chat


def chat(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    return to_chat(instructions, normal_items(items))


def says(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "input_text", "text": text} for text in texts]}


def test_text_alone() -> None:
    (item,) = normal_items("hi")
    assert (item["type"], item["role"], item["status"]) == ("message", "user", "completed")
    assert item["id"].startswith("msg_")
    assert to_chat(None, [item]) == [{"role": "user", "content": "hi"}]


def test_one_message_of_instructions() -> None:
    user = {"role": "user", "content": "u"}
    assert chat(user, instructions="a") == [{"role": "system", "content": "a"}, user]
    for role in ("system", "developer"):
        first = chat(says(role, "b"), says(role, "c"), user, says(role, "d"), instructions="a")
        parts = [{"type": "text", "text": text} for text in "abc"]
        assert first == [{"role": role, "content": parts}, user, {"role": role, "content": "d"}]
    assert chat(says("system", "b"), says("developer", "c"), instructions=None) == [
        {"role": "system", "content": "b"},
        {"role": "developer", "content": "c"},
    ]


def test_the_assistants_items_are_one_turn() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "r"}
    thinking = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]}
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert chat(thinking, message, call, result, thinking, message) == [
        {"role": "assistant", "content": "t", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"},
        {"role": "assistant", "content": "t", "reasoning_content": "hm"},
    ]


def test_reasoning_in_each_form() -> None:
    message = {"role": "assistant", "content": "t"}
    for form, text in (
        ({"encrypted_content": sealed("é")}, "é"),
        ({"summary": [{"type": "summary_text", "text": "s"}]}, "s"),
        ({"content": [], "encrypted_content": sealed("x"), "summary": [{"type": "summary_text", "text": "s"}]}, "x"),
    ):
        (turn,) = chat({"type": "reasoning", **form}, message)
        assert turn["reasoning_content"] == text
    for foreign in ("gAAAAA==not ours", "/////w==", 5):
        assert chat({"type": "reasoning", "encrypted_content": foreign}, message) == [message]


def test_refusals_are_text() -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert chat(refusal) == [{"role": "assistant", "content": "no"}]
