"""Tools of MCP servers in /v1/responses: a real MCP server, scripted turns, OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from asgi_call import AsgiCall
from fake_engine import FakeLLM
from mcp_server import ToolServerThread
from openai_client import client_of
from scripted import CALLED, Scripted, call, text, thought
from starlette.applications import Starlette

from octavo._core import Tokenizer
from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.app import make_app
from octavo.server.events import ToolName
from octavo.server.mcp.servers import ToolServers

CALC: dict[str, Any] = {"type": "mcp", "server_label": "calc", "require_approval": "never"}
ADD = '{"a": 1, "b": 2}'


@pytest.fixture(scope="module")
def server() -> Iterator[ToolServerThread]:
    made = ToolServerThread()
    yield made
    made.close()


@pytest.fixture
def llm(tokenizer: Tokenizer, model_folder: Path) -> FakeLLM:
    return FakeLLM(tokenizer, str(model_folder), max_model_len=4096)


@pytest.fixture
def config(server: ToolServerThread) -> ServerConfig:
    server.calls.clear()
    return ServerConfig(responses_store=8, tool_server=[f"calc={server.url}"], tool_timeout_s=10, max_tool_turns=3)


@pytest.fixture
def agent(app: Starlette) -> openai.AsyncOpenAI:
    return client_of(app)


async def create(client: openai.AsyncOpenAI, **body: Any) -> Any:
    return await client.responses.create(**{"model": "tiny", "input": "1+2?", "tools": [CALC], **body})


async def test_a_call_between_two_turns(
    agent: openai.AsyncOpenAI, scripted: Scripted, server: ToolServerThread
) -> None:
    scripted.say([*thought("hm"), *call(0, "add", '{"a": 1,', ' "b": 2}'), *CALLED], text("3"))
    answer = await create(agent, tool_choice="required")
    assert [item.type for item in answer.output] == ["mcp_list_tools", "reasoning", "mcp_call", "message"]
    listed, _, used, _ = answer.output
    assert {tool.name for tool in listed.tools} == {"add", "fail", "wait"}
    assert (used.server_label, used.name, used.arguments, used.output, used.error) == ("calc", "add", ADD, "3", None)
    assert (answer.status, answer.output_text, answer.usage.output_tokens) == ("completed", "3", 14)
    assert server.calls == [("add", (1, 2))]
    first, second = (turn.request for turn in scripted.turns)
    assert (first.tool_choice, second.tool_choice) == ("required", "auto")
    assert {tool["function"]["name"] for tool in first.tools} == {"add", "fail", "wait"}
    assert [message["role"] for message in second.messages] == ["user", "assistant", "tool"]
    assert second.messages[1]["reasoning_content"] == "hm"
    assert second.messages[2]["content"] == "3"


async def test_events(app: Starlette, scripted: Scripted) -> None:
    scripted.say([*call(0, "add", ADD), *CALLED], text("3"))
    sent = AsgiCall(app, "/v1/responses", {"input": "hi", "stream": True, "tools": [CALC]})
    await sent.next()
    blocks = (await sent.rest()).decode().strip().split("\n\n")
    events = [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    indexes = [event["output_index"] for event in events if "output_index" in event]
    assert indexes == sorted(indexes)
    assert set(indexes) == {0, 1, 2}


async def test_a_conversation_goes_on_without_a_second_list(agent: openai.AsyncOpenAI, scripted: Scripted) -> None:
    scripted.say([*call(0, "add", ADD), *CALLED], text("3"), text("yes"))
    first = await create(agent)
    second = await create(agent, input="sure?", previous_response_id=first.id)
    assert [item.type for item in second.output] == ["message"]
    roles = [message["role"] for message in scripted.turns[2].request.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "said"),
    [
        ("fail", "{}", "mcp_tool_execution_error", "it broke"),
        ("add", "[1]", "mcp_protocol_error", "no JSON object"),
        ("add", '{"a": "x"}', "mcp_tool_execution_error", "valid"),
    ],
)
async def test_failed_calls_are_told_to_the_model(
    agent: openai.AsyncOpenAI, scripted: Scripted, name: str, arguments: str, kind: str, said: str
) -> None:
    scripted.say([*call(0, name, arguments), *CALLED], text("sorry"))
    answer = await create(agent)
    used = answer.output[1]
    assert (used.status, used.output, used.error.type) == ("failed", None, kind)
    assert answer.status == "completed"
    told = scripted.turns[1].request.messages[2]["content"]
    assert told.startswith("Error: ")
    assert said in told


async def test_a_slow_tool_is_given_up(llm: FakeLLM, scripted: Scripted, server: ToolServerThread) -> None:
    config = ServerConfig(tool_server=[f"calc={server.url}"], tool_timeout_s=0.5)
    scripted.say([*call(0, "wait", "{}"), *CALLED], text("sorry"))
    answer = await create(client_of(make_app(llm, config)))  # type: ignore[arg-type]
    assert answer.output[1].error.type == "http_error"
    assert "0.5 s" in answer.output[1].error.message
    assert answer.output_text == "sorry"


@pytest.mark.parametrize(("timeout_s", "drain_s", "cut"), [(0.3, 20, 0), (20, 0, 1)])
async def test_a_drain_while_a_tool_works(
    llm: FakeLLM, scripted: Scripted, server: ToolServerThread, timeout_s: float, drain_s: float, cut: int
) -> None:
    """What was admitted goes on to its answer, with further turns; at the end of the time it is told so."""
    server.calls.clear()
    config = ServerConfig(tool_server=[f"calc={server.url}"], tool_timeout_s=timeout_s, responses_store=2)
    app = make_app(llm, config)  # type: ignore[arg-type]
    context, client = app.state.context, client_of(app)
    scripted.say([*call(0, "wait", "{}"), *CALLED], text("sorry"))
    accepted = await create(client, background=True)
    async with asyncio.timeout(20):
        while not server.calls:
            await asyncio.sleep(0)
    assert (len(context.live.calls), len(context.live)) == (0, 1)
    assert await context.drain(drain_s) == cut
    kept = context.responses.get(accepted.id, "default")
    await kept.task
    assert not context.live.runs
    if cut:
        assert (kept.response["status"], "shut down" in kept.response["error"]["message"]) == ("failed", True)
    else:
        assert (kept.response["status"], len(scripted.turns)) == ("completed", 2)


async def test_an_operator_ends_a_response_while_a_tool_works(
    app: Starlette, scripted: Scripted, server: ToolServerThread
) -> None:
    scripted.say([*call(0, "wait", "{}"), *CALLED])
    sent = AsgiCall(app, "/v1/responses", {"input": "hi", "tools": [CALC]}, headers=[(b"x-request-id", b"job")])
    async with asyncio.timeout(20):
        while not server.calls:
            await asyncio.sleep(0)
    assert app.state.context.abort("job") == 1
    assert (await sent.next())["status"] == 503
    assert not app.state.context.live.runs


async def test_bounds_on_turns_and_calls(
    agent: openai.AsyncOpenAI, llm: FakeLLM, scripted: Scripted, server: ToolServerThread
) -> None:
    again = [*call(0, "add", ADD), *call(1, "add", ADD, id="other"), *CALLED]
    scripted.say(again, again, text("enough"))
    answer = await create(agent)
    assert len(server.calls) == 4
    assert [turn.request.tool_choice for turn in scripted.turns] == ["auto", "auto", "none"]
    assert answer.output_text == "enough"
    scripted.turns.clear()
    scripted.say(again, text("enough"))
    answer = await create(agent, max_tool_calls=1)
    assert len(server.calls) == 5
    assert [item.status for item in answer.output[1:3]] == ["completed", "failed"]
    assert scripted.turns[1].request.tool_choice == "none"
    scripted.turns.clear()
    config = ServerConfig(tool_server=[f"calc={server.url}"], tool_loop_timeout_s=0)
    await create(client_of(make_app(llm, config)))  # type: ignore[arg-type]
    assert [turn.request.tool_choice for turn in scripted.turns] == ["auto", "none"]


async def test_later_turns_share_the_budget(agent: openai.AsyncOpenAI, scripted: Scripted) -> None:
    scripted.say([*call(0, "add", ADD), *CALLED], text("3"))
    await create(agent, max_output_tokens=20)
    assert [turn.request.params.max_tokens for turn in scripted.turns] == [20, 13]


async def test_the_requests_own_functions_go_to_the_client(
    agent: openai.AsyncOpenAI, scripted: Scripted, server: ToolServerThread
) -> None:
    scripted.say([*call(0, "add", ADD), *call(1, "mine", "{}"), *CALLED])
    answer = await create(agent, tools=[CALC, {"type": "function", "name": "mine", "parameters": {}}])
    assert [item.type for item in answer.output] == ["mcp_list_tools", "function_call", "mcp_call"]
    assert len(scripted.turns) == 1
    assert server.calls == [("add", (1, 2))]


async def test_names_that_clash(agent: openai.AsyncOpenAI, scripted: Scripted, server: ToolServerThread) -> None:
    scripted.say([*call(0, "calc__add", ADD), *CALLED], text("3"))
    answer = await create(agent, tools=[CALC, {"type": "function", "name": "add", "parameters": {}}])
    assert (answer.output[1].name, answer.output[1].output) == ("add", "3")


@pytest.mark.parametrize(
    ("allowed", "names"),
    [(["add"], ["add"]), ({"tool_names": ["fail", "wait"]}, ["fail", "wait"]), ({"read_only": True}, ["add"])],
)
async def test_allowed_tools(agent: openai.AsyncOpenAI, scripted: Scripted, allowed: Any, names: list[str]) -> None:
    scripted.say(text("a"))
    answer = await create(agent, tools=[{**CALC, "allowed_tools": allowed}])
    assert [tool.name for tool in answer.output[0].tools] == names
    assert [tool["function"]["name"] for tool in scripted.turns[0].request.tools] == names


@pytest.mark.parametrize(
    ("choice", "expected", "num_tools"),
    [
        ({"type": "mcp", "server_label": "calc", "name": "add"}, ToolName("add"), 1),
        ({"type": "mcp", "server_label": "calc"}, "required", 3),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "calc"}]}, "auto", 3),
    ],
)
async def test_tool_choice(
    agent: openai.AsyncOpenAI, scripted: Scripted, choice: Any, expected: Any, num_tools: int
) -> None:
    scripted.say(text("a"))
    await create(agent, tools=[CALC, {"type": "function", "name": "mine", "parameters": {}}], tool_choice=choice)
    assert scripted.turns[0].request.tool_choice == expected
    assert len(scripted.turns[0].request.tools) == num_tools


@pytest.mark.parametrize(
    "approval", [None, "always", {"never": {"read_only": False}}, {"always": {"tool_names": ["add"]}}]
)
async def test_approval(agent: openai.AsyncOpenAI, scripted: Scripted, server: ToolServerThread, approval: Any) -> None:
    scripted.say([*call(0, "add", ADD), *CALLED], text("3"), text("as you wish"))
    tool = {**CALC, "require_approval": approval}
    asked = await create(agent, tools=[tool])
    request = asked.output[-1]
    assert (request.type, request.name, request.arguments) == ("mcp_approval_request", "add", ADD)
    assert not server.calls
    word = {"type": "mcp_approval_response", "approval_request_id": request.id}
    done = await create(agent, input=[{**word, "approve": True}], previous_response_id=asked.id, tools=[tool])
    assert [item.type for item in done.output] == ["mcp_call", "message"]
    assert (done.output[0].output, done.output[0].approval_request_id) == ("3", request.id)
    assert server.calls == [("add", (1, 2))]
    refusal = [{**word, "approve": False, "reason": "no"}]
    refused = await create(agent, input=refusal, previous_response_id=asked.id, tools=[tool])
    assert [item.type for item in refused.output] == ["message"]
    assert scripted.turns[-1].request.messages[-1]["content"] == "Error: the user refused this call: no"
    assert len(server.calls) == 1
    with pytest.raises(openai.BadRequestError, match="no mcp_approval_request"):
        await create(agent, input=[{**word, "approval_request_id": "mcpr_0", "approve": True}])


@pytest.mark.parametrize("odd", [None, [], {}, 5, "x"])
async def test_odd_items_of_servers(agent: openai.AsyncOpenAI, scripted: Scripted, odd: Any) -> None:
    """What clients send back may be anything."""
    scripted.say(text("a"))
    items = [
        {"role": "user", "content": "x"},
        {"type": "mcp_list_tools", "server_label": odd, "tools": odd},
        {"type": "mcp_call", "id": "m1", "name": "add", "arguments": "{", "approval_request_id": odd, "error": odd},
        {"type": "mcp_approval_request", "id": "r1", "name": "nothing", "arguments": "x", "server_label": odd},
        {"type": "mcp_approval_response", "approval_request_id": "r1", "approve": True},
    ]
    answer = await create(agent, input=items)
    assert [item.type for item in answer.output] == ["mcp_list_tools", "message"]


async def test_trusted_tools_need_no_approval(
    agent: openai.AsyncOpenAI, scripted: Scripted, server: ToolServerThread
) -> None:
    scripted.say([*call(0, "add", ADD), *CALLED], text("3"))
    answer = await create(agent, tools=[{**CALC, "require_approval": {"never": {"tool_names": ["add"]}}}])
    assert answer.output_text == "3"


async def test_a_server_that_is_not_there(llm: FakeLLM) -> None:
    app = make_app(llm, ServerConfig(tool_server=["calc=http://127.0.0.1:9/mcp"]))  # type: ignore[arg-type]
    with pytest.raises(openai.APIStatusError, match="can't be listed") as failed:
        await create(client_of(app))
    assert failed.value.status_code == 424


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"server_label": "other"}, "configured: calc"),
        ({"server_url": "http://127.0.0.1:1/mcp"}, "never contacted"),
        ({"connector_id": "connector_gmail"}, "connector_id is not taken"),
        ({"headers": {"a": "b"}}, "headers is not taken"),
        ({"authorization": "secret"}, "authorization is not taken"),
        ({"allowed_tools": "add"}, "allowed_tools must be"),
        ({"require_approval": "sometimes"}, "require_approval must be"),
    ],
)
async def test_what_requests_may_not_ask(
    agent: openai.AsyncOpenAI, server: ToolServerThread, tool: Any, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        await create(agent, tools=[{**CALC, **tool}])


@pytest.mark.parametrize("option", ["calc", "calc=", "calc=ftp://x/mcp", "a b=http://x", "=http://x", "calc=http://"])
def test_options_are_checked(option: str) -> None:
    with pytest.raises(ConfigError, match="--tool-server"):
        ToolServers([option], 1)
    with pytest.raises(ConfigError, match="twice"):
        ToolServers(["a=http://x/", "a=http://y/"], 1)
