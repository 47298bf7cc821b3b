"""/v1/responses as coding agents use it: custom tools, whose input is free text, and tools that OpenAI runs itself."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from asgi_call import AsgiCall
from openai_client import client_of
from scripted import CALLED, Scripted, call, text
from starlette.applications import Starlette

from octavo.server.responses.tools import FREE_INPUT
from octavo.server.schema import unknown

PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
}
SHELL: dict[str, Any] = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def openai_client(app: Starlette) -> openai.AsyncOpenAI:
    return client_of(app)


async def test_a_round_of_a_custom_tool(openai_client: openai.AsyncOpenAI, scripted: Scripted) -> None:
    scripted.say([*call(0, "apply_patch", '{"input": "*** é', '\\n+x"}'), *CALLED], text("done"))
    history: list[Any] = [{"role": "user", "content": "edit"}]
    first = await openai_client.responses.create(model="tiny", input=history, tools=[PATCH, SHELL])
    (made,) = first.output
    assert (made.type, made.name, made.call_id, made.input) == (
        "custom_tool_call",
        "apply_patch",
        "call_0",
        "*** é\n+x",
    )
    assert [tool.type for tool in first.tools] == ["custom", "function"]
    history += [made.model_dump(exclude_none=True)]
    history.append({"type": "custom_tool_call_output", "call_id": "call_0", "output": "ok"})
    second = await openai_client.responses.create(
        model="tiny", input=history, tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"}
    )
    assert second.output_text == "done"
    request = scripted.turns[1].request
    (function,) = [tool["function"] for tool in request.tools]
    assert function == {
        "name": "apply_patch",
        "description": 'Edits files.\n\nThe input follows this grammar:\nstart: "a"',
        "parameters": FREE_INPUT,
    }
    assert request.messages[1]["tool_calls"][0]["function"] == {
        "name": "apply_patch",
        "arguments": '{"input": "*** é\\n+x"}',
    }
    assert request.messages[2] == {"role": "tool", "tool_call_id": "call_0", "name": "apply_patch", "content": "ok"}


async def test_a_streamed_call_of_a_custom_tool(app: Starlette, scripted: Scripted) -> None:
    scripted.say([*call(0, "apply_patch", '{"input":', ' "a"}'), *call(1, "shell", "{}"), *CALLED])
    sent = AsgiCall(app, "/v1/responses", {"input": "hi", "tools": [PATCH, SHELL], "stream": True})
    await sent.next()
    blocks = [block.split("\n") for block in (await sent.rest()).decode().strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [event["type"].removeprefix("response.") for event in events[2:-1]] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert (events[2]["item"]["input"], events[3]["delta"], events[4]["input"]) == ("", "a", "a")
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["custom_tool_call", "function_call"]


async def test_input_of_a_call_that_was_cut_is_what_came(openai_client: openai.AsyncOpenAI, scripted: Scripted) -> None:
    for arguments in ('{"input": "a', "[1]", '{"input": 5}'):
        scripted.say([*call(0, "apply_patch", arguments), *CALLED])
        answer = await openai_client.responses.create(model="tiny", input="x", tools=[PATCH])
        assert answer.output[0].input == arguments


async def test_tools_that_are_run_elsewhere_are_left_out(
    openai_client: openai.AsyncOpenAI,
    scripted: Scripted,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Codex sends web_search with every request."""
    monkeypatch.setattr(unknown, "_named", set())
    scripted.say(text("a"))
    for kind in ("web_search", "web_search_2025_08_26", "code_interpreter", "local_shell", "namespace"):
        tools: Any = [{"type": kind, "external_web_access": False}, SHELL]
        answer = await openai_client.responses.create(model="tiny", input="x", tools=tools)
        assert [tool.type for tool in answer.tools] == ["function"]
        assert f"tools of type '{kind}'" in caplog.text
    assert [tool["function"]["name"] for tool in scripted.turns[-1].request.tools] == ["shell"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "functoin", "name": "f"}]}, "'functoin' tools are not available"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "needs tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "not known here"),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [{**PATCH, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [PATCH, {**SHELL, "name": "apply_patch"}]}, "comes twice"),
        ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]}, "input must be a string"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "1", "output": ""}]}, "no call with the id"),
    ],
)
async def test_bad_tools(client: httpx.AsyncClient, fields: dict[str, Any], message: str) -> None:
    answer = await client.post("/v1/responses", json={"input": "x", **fields})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
